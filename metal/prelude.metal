// Shared by all bodies. On Metal only this file is put before a kernel; on CUDA `cuda.metal` comes first and defines DF_CUDA.
#ifndef DF_CUDA
#include <metal_simdgroup_matrix>
// Every fused multiply-add is written out, so that one row and eight rows round alike whatever the compiler would fuse.
#pragma METAL fp contract(off)
#define DF_UNROLL _Pragma("clang loop unroll(full)")
#define DF_STREAM(pointer) (*(pointer))
#define DF_PLANT(word, mask) (((word) & (mask)) | 0x4b000000u)
#endif

// Masked bits of a word as a float, by conversion or (MAGIC) by planting them in the mantissa of 2^23. Both are exact.
#define DF_FIELD(word, mask) (MAGIC ? as_type<float>(DF_PLANT(word, mask)) - 8388608.0f : float((word) & (mask)))
