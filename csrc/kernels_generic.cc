// The kernels for generic; CMakeLists.txt gives this file its instruction set.
#define ROOFLAX_ISA generic
#define ROOFLAX_ISA_NAME "generic"
#include "kernels_impl.h"
