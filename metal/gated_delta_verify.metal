// Gated delta rule over the rows of a block, with a tape instead of snapshots.
//   q, k [B, T, HK, DK] X (normalised), v [B, T, HV, DV] X, g [B, T, HV] float, beta [B, T, HV] Y, state [B, HV, DV, DK] float
//   tape_k [B, P, HK, DK] X, tape_g [B, P, HV] float, tape_delta [B, P, HV, DV] float, counts [3] int: T, P, and how many tape rows were accepted
//   -> y [B, T, HV, DV] X, committed [B, HV, DV, DK] float (state after the kept tape rows), delta [B, T, HV, DV] float
// A team of 8 lanes owns one row of the state, float4s in turn; it stays in registers from the one load to the one store.
// A tape row repeats the two roundings that its step made (decay, then one fma), so replaying is bit-equal to having stepped.
// Grid: 32 * (DV / 4) * HV * B threads in groups of 128: 4 simdgroups, 16 state rows. DV % 16 == 0, DK % 32 == 0.
constexpr int QUADS = DK / 32;
const uint tid = thread_position_in_threadgroup.x;
const uint lane = tid % 8;
const uint flat = threadgroup_position_in_grid.x * 16 + tid / 8;  // (b * HV + hv) * DV + dv
const uint dv = flat % DV;
const uint hv = flat / DV % HV;
const uint b = flat / (DV * HV);
const uint hk = hv / (HV / HK);
float s[QUADS * 4];
DF_UNROLL
for (int j = 0; j < QUADS; j++) {
  const float4 four = *((const device float4*)state + size_t(flat) * (DK / 4) + j * 8 + lane);
  s[j * 4] = four.x;
  s[j * 4 + 1] = four.y;
  s[j * 4 + 2] = four.z;
  s[j * 4 + 3] = four.w;
}
const int T = counts[0];
const int P = counts[1];
const int kept = counts[2];
for (int t = 0; t < kept; t++) {
  const float decay = tape_g[(b * P + t) * HV + hv];
  const float change = tape_delta[((b * P + t) * HV + hv) * DV + dv];
  const uint from = ((b * P + t) * HK + hk) * DK + lane * 4;
  DF_UNROLL
  for (int i = 0; i < QUADS * 4; i++) s[i] = fma(float(tape_k[from + i / 4 * 32 + i % 4]), change, s[i] * decay);
}
DF_UNROLL
for (int j = 0; j < QUADS; j++) {
  float4 four;
  four.x = s[j * 4];
  four.y = s[j * 4 + 1];
  four.z = s[j * 4 + 2];
  four.w = s[j * 4 + 3];
  *((device float4*)committed + size_t(flat) * (DK / 4) + j * 8 + lane) = four;
}
for (int t = 0; t < T; t++) {
  const float decay = g[(b * T + t) * HV + hv];
  const uint from = ((b * T + t) * HK + hk) * DK + lane * 4;
  const uint to = ((b * T + t) * HV + hv) * DV + dv;
  float known = 0.0f;
  float keys[QUADS * 4];
  DF_UNROLL
  for (int i = 0; i < QUADS * 4; i++) {
    keys[i] = float(k[from + i / 4 * 32 + i % 4]);
    s[i] = s[i] * decay;
    known = fma(s[i], keys[i], known);
  }
  known += simd_shuffle_xor(known, 1);
  known += simd_shuffle_xor(known, 2);
  known += simd_shuffle_xor(known, 4);
  const float change = (float(v[to]) - known) * float(beta[(b * T + t) * HV + hv]);
  float out = 0.0f;
  DF_UNROLL
  for (int i = 0; i < QUADS * 4; i++) {
    s[i] = fma(keys[i], change, s[i]);
    out = fma(s[i], float(q[from + i / 4 * 32 + i % 4]), out);
  }
  out += simd_shuffle_xor(out, 1);
  out += simd_shuffle_xor(out, 2);
  out += simd_shuffle_xor(out, 4);
  if (lane == 0) {
    y[to] = X(out);
    delta[to] = change;
  }
}
