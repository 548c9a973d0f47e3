// The kernels by AVX-VNNI's products of bytes; CMakeLists.txt gives this file its instruction set.
#define ROOFLAX_ISA avx2_vnni
#define ROOFLAX_VNNI
#include "kernels_impl.h"
