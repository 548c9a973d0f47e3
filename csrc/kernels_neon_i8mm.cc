// The kernels for NEON with i8mm; CMakeLists.txt gives this file its instruction set.
#define ROOFLAX_ISA neon_i8mm
#define ROOFLAX_ISA_NAME "neon-i8mm"
#include "kernels_impl.h"
