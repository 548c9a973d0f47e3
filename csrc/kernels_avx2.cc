// The kernels for avx2; CMakeLists.txt gives this file its instruction set.
#define ROOFLAX_ISA avx2
#define ROOFLAX_ISA_NAME "avx2"
#include "kernels_impl.h"
