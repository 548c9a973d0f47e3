// The kernels for avx512; CMakeLists.txt gives this file its instruction set.
#define ROOFLAX_ISA avx512
#define ROOFLAX_ISA_NAME "avx512"
#define ROOFLAX_STREAMS 1
#define ROOFLAX_CODE_STREAMS 4
#include "kernels_impl.h"
