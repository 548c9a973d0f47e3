// The kernels by tiles of AMX; CMakeLists.txt gives this file its instruction set.
#define ROOFLAX_ISA amx
#define ROOFLAX_STREAMS 4
#define ROOFLAX_CODE_STREAMS 4
#define ROOFLAX_TILES
#include "kernels_impl.h"
