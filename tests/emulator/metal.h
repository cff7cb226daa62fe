// Metal words for a C++ compiler (clang with ext_vector_type): types, conversions, and calls into runtime.cpp.
#pragma once
typedef __SIZE_TYPE__ size_t;
typedef unsigned int uint;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef __bf16 bfloat16_t;
typedef _Float16 float16_t;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));

#define device
#define constant
#define thread
#define threadgroup  // what is left after build.py has taken the declarations: pointers
#define INFINITY __builtin_inff()

namespace mem_flags {
enum Flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
}
using namespace mem_flags;

struct Ids {
  uint3 thread_position_in_threadgroup, threadgroup_position_in_grid, thread_position_in_grid;
  uint thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
};

struct Words {
  uint w[6];
};

extern "C" {
void* emu_threadgroup(size_t bytes);
void emu_barrier(int site, int flags);
void emu_simdgroup_barrier(int site, int flags);
const Words* emu_meet(int site, Words mine);          // one entry per lane of the simdgroup
uint emu_shuffle(int site, uint value, uint from);
uint emu_lane();
}

template <typename To, typename From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type changes no size");
  return __builtin_bit_cast(To, value);
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <typename V>
inline V emu_shuffle_of(int site, V value, uint from) {
  return as_type<V>(emu_shuffle(site, as_type<uint>(value), from));
}
inline float emu_simd_sum(int site, float value) {
  // An order that Metal does not promise: ascending lanes. Tests may lean on its being one order, not on which.
  Words mine = {{as_type<uint>(value)}};
  const Words* all = emu_meet(site, mine);
  float sum = 0;
  for (int i = 0; i < 32; i++) sum += as_type<float>(all[i].w[0]);
  return sum;
}
#define threadgroup_barrier(flags) emu_barrier(__LINE__, flags)
#define simdgroup_barrier(flags) emu_simdgroup_barrier(__LINE__, flags)
#define simd_sum(value) emu_simd_sum(__LINE__, value)
#define simd_shuffle(value, lane) emu_shuffle_of(__LINE__, value, lane)
#define simd_shuffle_xor(value, mask) emu_shuffle_of(__LINE__, value, emu_lane() ^ uint(mask))
#define simd_shuffle_down(value, by) emu_shuffle_of(__LINE__, value, emu_lane() + uint(by))

// An 8x8 matrix is spread over a simdgroup, two neighbours of one row in each lane.
template <typename V, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "8x8 only");
  typedef V Pair __attribute__((ext_vector_type(2)));
  Pair pair;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(V value) : pair{value, value} {}
  Pair& thread_elements() { return pair; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
inline uint emu_row(uint lane) { return ((lane >> 4) << 2) + ((lane >> 1) & 3); }
inline uint emu_column(uint lane) { return ((lane >> 3) & 1) * 4 + (lane & 1) * 2; }
inline float emu_element(const Words* all, int word, uint row, uint column) {
  const uint lane = (row >> 2) * 16 + (column >> 2) * 8 + (row & 3) * 2 + ((column >> 1) & 1);
  return as_type<float>(all[lane].w[word + (column & 1)]);
}
// Not inlined, so that counts of the kernel do not take in how this is done here.
__attribute__((noinline)) inline simdgroup_float8x8 emu_product(
    int site, simdgroup_float8x8 a, simdgroup_float8x8 b, simdgroup_float8x8 c) {
  Words mine = {{as_type<uint>(a.pair.x), as_type<uint>(a.pair.y), as_type<uint>(b.pair.x), as_type<uint>(b.pair.y)}};
  const Words* all = emu_meet(site, mine);
  const uint row = emu_row(emu_lane()), column = emu_column(emu_lane());
  for (uint k = 0; k < 8; k++) {
    const float left = emu_element(all, 0, row, k);
    c.pair.x = fma(left, emu_element(all, 2, k, column), c.pair.x);
    c.pair.y = fma(left, emu_element(all, 2, k, column + 1), c.pair.y);
  }
  return c;
}
#define simdgroup_multiply_accumulate(d, a, b, c) (d) = emu_product(__LINE__, a, b, c)
