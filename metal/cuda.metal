// The words of the Metal language that the bodies use, for MLX's CUDA back end.
#define DF_CUDA
#define DF_UNROLL _Pragma("unroll")
using uint = unsigned int;

template <typename To>
__device__ inline float as_type(uint bits) {
  return __uint_as_float(bits);
}

__device__ inline float simd_shuffle_xor(float value, unsigned mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// Weights are read once: keep them out of L1, where the activations live.
__device__ inline uint4 DF_STREAM(const uint4* pointer) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
  return v;
}

// One LOP3 (the compiler makes two of the same expression).
__device__ inline uint DF_PLANT(uint word, uint mask) {
  uint planted;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(planted) : "r"(word), "r"(mask), "r"(0x4b000000u));
  return planted;
}

// An 8x8 matrix over a warp, two neighbours of a row in each lane; products by shuffles, for parity and not for speed.
template <typename V, int R, int C>
struct simdgroup_matrix {
  V pair[2];
  simdgroup_matrix() = default;
  __device__ explicit simdgroup_matrix(V value) : pair{value, value} {}
  __device__ V* thread_elements() { return pair; }
};
using df_tile = simdgroup_matrix<float, 8, 8>;
__device__ inline void simdgroup_multiply_accumulate(df_tile& d, df_tile a, df_tile b, df_tile c) {
  const unsigned lane = threadIdx.x % 32, left = lane & 22, top = lane & 9;
  DF_UNROLL
  for (unsigned k = 0; k < 8; k++) {
    const float value = __shfl_sync(0xffffffffu, a.pair[k % 2], left + k / 4 * 8 + k / 2 % 2);
    const unsigned from = top + k / 4 * 16 + k % 4 * 2;
    for (int i = 0; i < 2; i++) c.pair[i] = fma(value, __shfl_sync(0xffffffffu, b.pair[i], from), c.pair[i]);
  }
  d = c;
}

// Last, because CUDA's own qualifiers are spelled with these words.
#define device
#define constant
#define thread
#define threadgroup __shared__
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threadgroup_barrier(flags) __syncthreads()
