// Activations for verify_qmv: widened to float, scaled by the place of their weight's bits in a 16-bit half word, and summed.
//   x [M, K] T -> xs [STEPS, QUADS, M, 8] float4, xsum [STEPS, M, 8] float; zeros beyond K.
// One thread per 128 bits of weights (32 or 16 activations). Grid: STEPS * M * 8 threads, flat. M may be a fraction of a group.
constexpr int SPAN = 128 / BITS;
constexpr int QUADS = SPAN / 4;
constexpr int STEPS = (K + 8 * SPAN - 1) / (8 * SPAN);
constexpr float SHIFT = BITS == 4 ? 0.0625f : 0.00390625f;
const uint index = threadgroup_position_in_grid.x * 64 + thread_position_in_threadgroup.x;
if (index < uint(STEPS * M * 8)) {
  const uint lane = index % 8;
  const uint m = index / 8 % M;
  const uint step = index / (8 * M);
  const uint k = (step * 8 + lane) * SPAN;
  float sum = 0.0f;
  DF_UNROLL
  for (int q = 0; q < QUADS; q++) {
    float v[4];
    DF_UNROLL
    for (int i = 0; i < 4; i++) {
      v[i] = k < uint(K) ? float(x[size_t(m) * K + k + q * 4 + i]) : 0.0f;
      sum += v[i];
    }
    device float* out = xs + size_t(((step * QUADS + q) * M + m) * 8 + lane) * 4;
    out[0] = v[0];
    out[1] = v[1] * SHIFT;
    out[2] = v[2] * (BITS == 4 ? SHIFT * SHIFT : 1.0f);
    out[3] = v[3] * (BITS == 4 ? SHIFT * SHIFT * SHIFT : SHIFT);
  }
  xsum[index] = sum;
}
