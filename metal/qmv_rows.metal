// After qmv_dot: y [M, N] O.
for (uint o = tid; o < uint(ROWS * M); o += SIMDS * 32) {
  const uint m = o / 4 % M;
  const uint row = first + o / (4 * M) * 4 + o % 4;
  float sum = 0.0f;
  DF_UNROLL
  for (int i = 0; i < SIMDS * 8; i++) sum += part[o / 4 * PITCH + i / 8 * 32 + o % 4 * 8 + i % 8];
  if (row < uint(N)) y[size_t(m) * N + row] = O(sum);
}
