// The kernels for AVX512-BF16's products of pairs; CMakeLists.txt gives this file its instruction set.
#define ROOFLAX_ISA avx512_bf16
#define ROOFLAX_STREAMS 4
#define ROOFLAX_CODE_STREAMS 1
#define ROOFLAX_DOTS
#include "kernels_impl.h"
