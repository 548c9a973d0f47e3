// The kernels for AMX, and for AVX-512 where tiles are not what is needed; CMakeLists.txt gives this file
// its instruction set.
#define ROOFLAX_ISA amx
#define ROOFLAX_ISA_NAME "amx"
#define ROOFLAX_STREAMS 4
#define ROOFLAX_TILES
#include "kernels_impl.h"
