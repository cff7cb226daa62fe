// Register-blocked GEMV over M activation rows; weights are read once and in place.
//   weight [N, K*BITS/32] uint, scales/biases [N, K/GROUP] T, xs and xsum from `prepare`.
// A simdgroup holds 4 teams of 8 lanes. A team owns R outputs; a lane owns 128 bits of every 8th span of K, so a team reads
// 128 consecutive bytes of each of its weight rows. The 4 simdgroups of a threadgroup take the steps in turn.
// R changes who computes an output, never the order of its sum; M changes neither: rows are bit-equal for every M.
constexpr int SPAN = 128 / BITS;
constexpr int QUADS = SPAN / 4;
constexpr int STEP = 8 * SPAN;
constexpr int STEPS = (K + STEP - 1) / STEP;
constexpr int SIMDS = 4;
constexpr int ROWS = 4 * R;
constexpr int PITCH = SIMDS * 32 + 1;  // one word of padding keeps the teams in different banks
constexpr uint MASK = BITS == 4 ? 0xfu : 0xffu;
const uint tid = thread_position_in_threadgroup.x;
const uint lane = tid % 8;
const uint team = tid / 8 % 4;
const uint first = threadgroup_position_in_grid.x * ROWS;

size_t at[R];  // clamped: rows beyond N repeat the last one and are not stored
DF_UNROLL
for (int r = 0; r < R; r++) {
  const uint row = first + r * 4 + team;
  at[r] = N % ROWS == 0 || row < uint(N) ? row : N - 1;
}
float acc[R][M];
uint4 ahead[R];
uint step = tid / 32;
DF_UNROLL
for (int r = 0; r < R; r++) {
  DF_UNROLL
  for (int m = 0; m < M; m++) acc[r][m] = 0.0f;
  const uint k = (step * 8 + lane) * SPAN;
  if (AHEAD && step < uint(STEPS))
    ahead[r] = DF_STREAM((const device uint4*)(weight + at[r] * (K * BITS / 32)) + (k < uint(K) ? k / SPAN : 0));
}
for (; step < uint(STEPS); step += SIMDS) {
  // A lane beyond K reads the first span again: its activations are zeros.
  const uint k0 = (step * 8 + lane) * SPAN;
  const uint k = K % STEP == 0 || k0 < uint(K) ? k0 : 0;
  const uint k1 = k0 + SIMDS * STEP;
  uint4 words[R];
  float scale[R], bias[R], dot[R][M];
  DF_UNROLL
  for (int r = 0; r < R; r++) {
    const device uint4* row = (const device uint4*)(weight + at[r] * (K * BITS / 32));
    words[r] = AHEAD ? ahead[r] : DF_STREAM(row + k / SPAN);
    if (AHEAD && step + SIMDS < uint(STEPS)) ahead[r] = DF_STREAM(row + (K % STEP == 0 || k1 < uint(K) ? k1 / SPAN : 0));
    scale[r] = float(scales[at[r] * (K / GROUP) + k / GROUP]);
    bias[r] = float(biases[at[r] * (K / GROUP) + k / GROUP]);
    DF_UNROLL
    for (int m = 0; m < M; m++) dot[r][m] = 0.0f;
  }
  const device float4* rows = (const device float4*)xs + size_t(step) * (QUADS * M * 8) + lane;
  DF_UNROLL
  for (int q = 0; q < QUADS; q++) {
    float4 v[M];
    DF_UNROLL
    for (int m = 0; m < M; m++) v[m] = rows[(q * M + m) * 8];
    DF_UNROLL
    for (int r = 0; r < R; r++) {
      const uint four[4] = {words[r].x, words[r].y, words[r].z, words[r].w};
      const uint word = four[BITS == 4 ? q / 2 : q];
      const uint low = BITS == 4 && q % 2 == 1 ? word >> 16 : word;
      const uint high = BITS == 4 ? low : word >> 16;
      const float w0 = DF_FIELD(low, MASK);
      const float w1 = DF_FIELD(low, MASK << BITS);
      const float w2 = DF_FIELD(high, BITS == 4 ? 0xf00u : 0xffu);
      const float w3 = DF_FIELD(high, BITS == 4 ? 0xf000u : 0xff00u);
      DF_UNROLL
      for (int m = 0; m < M; m++)
        dot[r][m] = fma(v[m].w, w3, fma(v[m].z, w2, fma(v[m].y, w1, fma(v[m].x, w0, dot[r][m]))));
    }
  }
  DF_UNROLL
  for (int m = 0; m < M; m++) {
    const float total = xsum[(step * M + m) * 8 + lane];
    DF_UNROLL
    for (int r = 0; r < R; r++) acc[r][m] = fma(scale[r], dot[r][m], fma(bias[r], total, acc[r][m]));
  }
}
// Lanes and simdgroups are added in one written order, so every machine sums alike.
threadgroup float part[R * M * PITCH];
DF_UNROLL
for (int r = 0; r < R; r++) {
  DF_UNROLL
  for (int m = 0; m < M; m++) part[(r * M + m) * PITCH + tid] = acc[r][m];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
