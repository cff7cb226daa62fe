// Activations for verify_qmm, in the order in which its lanes load them: x [M, K] X
//   -> xt [CHUNKS, PLACES, TILES, 32] float2 (B fragments, scaled by the place of their weight's bits), xsum [CHUNKS, TILES * 8].
// A chunk is 8 words of a weight row; step s of it multiplies field s of each word. One thread per chunk and row; zeros beyond M.
constexpr int PLACES = 32 / BITS;
constexpr int CHUNK = 8 * PLACES;
constexpr int TILES = (M + 7) / 8;
constexpr float SHIFT = BITS == 4 ? 0.0625f : 0.00390625f;
const uint index = threadgroup_position_in_grid.x * 64 + thread_position_in_threadgroup.x;
if (index < uint(K / CHUNK * TILES * 8)) {
  const uint m = index % (TILES * 8);
  const uint chunk = index / (TILES * 8);
  const uint column = m % 8;
  float sum = 0.0f;
  for (uint j = 0; j < 8; j++) {
    const uint lane = j / 4 * 16 + column / 4 * 8 + j % 4 * 2 + column / 2 % 2;
    float shift = 1.0f;
    for (uint s = 0; s < uint(PLACES); s++) {
      const float v = m < uint(M) ? float(x[size_t(m) * K + chunk * CHUNK + j * PLACES + s]) : 0.0f;
      xt[size_t(((chunk * PLACES + s) * TILES + m / 8) * 32 + lane) * 2 + column % 2] = v * shift;
      sum += v;
      shift *= SHIFT;
    }
  }
  xsum[index] = sum;
}
