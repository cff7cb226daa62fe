// The words of the Metal language that the bodies use, for MLX's CUDA back end.
#define DF_CUDA
#define DF_UNROLL _Pragma("unroll")
using uint = unsigned int;

template <typename To, typename From>
__device__ inline To as_type(From value) {
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
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

// Last, because CUDA's own qualifiers are spelled with these words.
#define device
#define constant
#define thread
#define threadgroup __shared__
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threadgroup_barrier(flags) __syncthreads()
