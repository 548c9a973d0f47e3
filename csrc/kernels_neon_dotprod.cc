// The kernels for NEON with dotprod; CMakeLists.txt gives this file its instruction set.
#define ROOFLAX_ISA neon_dotprod
#define ROOFLAX_ISA_NAME "neon-dotprod"
#include "kernels_impl.h"
