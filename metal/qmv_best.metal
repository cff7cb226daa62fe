// After qmv_dot: the best output of this threadgroup's rows for every m, rounded to O first as the logits would be.
//   value [M, GROUPS] float, place [M, GROUPS] uint (GROUPS = threadgroups). Ties go to the lowest row.
threadgroup float logits[ROWS * M];
for (uint o = tid; o < uint(ROWS * M); o += SIMDS * 32) {
  float sum = 0.0f;
  DF_UNROLL
  for (int i = 0; i < SIMDS * 8; i++) sum += part[o / 4 * PITCH + i / 8 * 32 + o % 4 * 8 + i % 8];
  logits[o / 4 % M * ROWS + o / (4 * M) * 4 + o % 4] = float(O(sum));
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (tid < uint(M)) {
  float best = logits[tid * ROWS];
  uint found = first;
  for (uint r = 1; r < uint(ROWS) && first + r < uint(N); r++) {
    if (logits[tid * ROWS + r] > best) {
      best = logits[tid * ROWS + r];
      found = first + r;
    }
  }
  constexpr uint GROUPS = (N + ROWS - 1) / ROWS;
  value[tid * GROUPS + threadgroup_position_in_grid.x] = best;
  place[tid * GROUPS + threadgroup_position_in_grid.x] = found;
}
