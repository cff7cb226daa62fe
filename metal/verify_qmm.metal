// Matrix-unit product for 6..16 rows: weight [N, K*BITS/32] uint, scales/biases [N, K/GROUP] T, xt and xsum from prepare_tiles
//   -> y [M, N] O. Not bit-equal to verify_qmv (the unit's rounding order is its own), so only `fast` mode uses it.
// The 8 columns of a fragment are 8 neighbouring words, so that a lane loads its two words once and decodes them in place, one
// field a step. A simdgroup owns 4 fragments of 8 outputs; 4 simdgroups take the chunks in turn. K % CHUNK == 0.
constexpr int PLACES = 32 / BITS;
constexpr int CHUNK = 8 * PLACES;
constexpr int TILES = (M + 7) / 8;
constexpr int FRAGMENTS = 4;
constexpr int SIMDS = 4;
constexpr int VALUES = FRAGMENTS * TILES * 2;
constexpr uint MASK = BITS == 4 ? 0xfu : 0xffu;
const uint tid = thread_position_in_threadgroup.x;
const uint lane = tid % 32;
const uint row = lane / 16 * 4 + lane / 2 % 4;
const uint column = lane / 8 % 2 * 4 + lane % 2 * 2;
const uint first = threadgroup_position_in_grid.x * (FRAGMENTS * 8);
size_t at[FRAGMENTS];
float acc[FRAGMENTS][TILES][2];
DF_UNROLL
for (int n = 0; n < FRAGMENTS; n++) {
  const uint output = first + n * 8 + row;
  at[n] = output < uint(N) ? output : N - 1;
  DF_UNROLL
  for (int t = 0; t < TILES; t++) acc[n][t][0] = acc[n][t][1] = 0.0f;
}
for (uint chunk = tid / 32; chunk < uint(K / CHUNK); chunk += SIMDS) {
  uint2 words[FRAGMENTS];
  simdgroup_matrix<float, 8, 8> dot[FRAGMENTS][TILES];
  DF_UNROLL
  for (int n = 0; n < FRAGMENTS; n++) {
    words[n] = *(const device uint2*)(weight + at[n] * (K / PLACES) + chunk * 8 + column);
    DF_UNROLL
    for (int t = 0; t < TILES; t++) dot[n][t] = simdgroup_matrix<float, 8, 8>(0.0f);
  }
  DF_UNROLL
  for (int s = 0; s < PLACES; s++) {
    simdgroup_matrix<float, 8, 8> right[TILES];
    DF_UNROLL
    for (int t = 0; t < TILES; t++) {
      const float2 pair = *((const device float2*)xt + size_t((chunk * PLACES + s) * TILES + t) * 32 + lane);
      right[t].thread_elements()[0] = pair.x;
      right[t].thread_elements()[1] = pair.y;
    }
    DF_UNROLL
    for (int n = 0; n < FRAGMENTS; n++) {
      simdgroup_matrix<float, 8, 8> left;
      left.thread_elements()[0] = float(words[n].x & (MASK << (s * BITS)));
      left.thread_elements()[1] = float(words[n].y & (MASK << (s * BITS)));
      DF_UNROLL
      for (int t = 0; t < TILES; t++) simdgroup_multiply_accumulate(dot[n][t], left, right[t], dot[n][t]);
    }
  }
  DF_UNROLL
  for (int n = 0; n < FRAGMENTS; n++) {
    const float scale = float(scales[at[n] * (K / GROUP) + chunk * CHUNK / GROUP]);
    const float bias = float(biases[at[n] * (K / GROUP) + chunk * CHUNK / GROUP]);
    DF_UNROLL
    for (int t = 0; t < TILES; t++) {
      const uint sums = (chunk * TILES + t) * 8 + column;
      acc[n][t][0] = fma(scale, dot[n][t].thread_elements()[0], fma(bias, xsum[sums], acc[n][t][0]));
      acc[n][t][1] = fma(scale, dot[n][t].thread_elements()[1], fma(bias, xsum[sums + 1], acc[n][t][1]));
    }
  }
}
threadgroup float part[VALUES * SIMDS * 32];
DF_UNROLL
for (int i = 0; i < VALUES; i++) part[i * (SIMDS * 32) + tid] = acc[i / 2 / TILES][i / 2 % TILES][i % 2];
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint o = tid; o < uint(VALUES * 32); o += SIMDS * 32) {
  const uint i = o / 32;
  const uint output = first + i / 2 / TILES * 8 + row;  // o % 32 == lane: this thread's own place in the fragment
  const uint m = i / 2 % TILES * 8 + column + i % 2;
  float sum = 0.0f;
  DF_UNROLL
  for (int simd = 0; simd < SIMDS; simd++) sum += part[i * (SIMDS * 32) + simd * 32 + lane];
  if (output < uint(N) && m < uint(M)) y[size_t(m) * N + output] = O(sum);
}
