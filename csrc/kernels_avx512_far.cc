// The kernels for avx512 where a thread reads memory faster from several places at once, and codes from one,
// as on AMD's processors; CMakeLists.txt gives this file its instruction set.
#define ROOFLAX_ISA avx512_far
#define ROOFLAX_ISA_NAME "avx512-far"
#define ROOFLAX_STREAMS 4
#define ROOFLAX_CODE_STREAMS 1
#include "kernels_impl.h"
