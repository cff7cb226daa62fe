// value [M, GROUPS] float, place [M, GROUPS] uint -> ids [M] uint: the place of the largest value, the lowest place on a tie.
// One threadgroup of 256 threads per row.
const uint tid = thread_position_in_threadgroup.x;
const uint row = threadgroup_position_in_grid.x;
threadgroup float best[256];
threadgroup uint found[256];
float top = as_type<float>(0xff800000u);
uint top_place = 0xffffffffu;
for (uint i = tid; i < uint(GROUPS); i += 256) {
  const float v = value[row * GROUPS + i];
  if (v > top || (v == top && place[row * GROUPS + i] < top_place)) {
    top = v;
    top_place = place[row * GROUPS + i];
  }
}
best[tid] = top;
found[tid] = top_place;
for (uint half_ = 128; half_ > 0; half_ /= 2) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < half_) {
    const float v = best[tid + half_];
    const uint p = found[tid + half_];
    if (v > best[tid] || (v == best[tid] && p < found[tid])) {
      best[tid] = v;
      found[tid] = p;
    }
  }
}
if (tid == 0) ids[row] = found[0];
