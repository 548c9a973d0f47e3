// The kernels' code, compiled once per instruction set: the including file names ROOFLAX_ISA,
// and with AVX-512 ROOFLAX_STREAMS, the places that a thread reads from at once.
//
// Vectors have sixteen lanes everywhere; a narrower machine gets them in pieces. What differs between
// instruction sets is what has an instruction of its own, as products of bytes and table look-ups,
// how many sums fit into registers, and, with AVX2, a table that several rows meet in blocks.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#if defined(ROOFLAX_TILES)
#include "tiles.h"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rooflax {
namespace ROOFLAX_ISA {
namespace {

#include "impl_wide.h"
#include "impl_vectors.h"
#include "impl_rows.h"
#include "impl_many.h"
#include "impl_matmul.h"
#include "impl_table.h"
#include "impl_packed.h"
#include "impl_pairs.h"
#include "impl_blocks.h"
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
#if defined(ROOFLAX_TILES)
#include "impl_tiles.h"
#include "impl_tiled_matrix.h"
#endif
#include "impl_attention.h"
#include "impl_delta.h"

}  // namespace

#if defined(ROOFLAX_TILES)
#define ROOFLAX_TILED_FROM {kInt8From, kNever, kGroupsFrom, kGroupsFrom, kGroupsFrom, \
                            kGroupsFrom, kGroupsFrom, kGroupsFrom, kGroupsFrom, kGroupsFrom, \
                            kGroupsFrom, kGroupsFrom, kGroupsFrom, kGroupsFrom, kGroupsFrom}
constexpr auto kBytes = BytesByTiles;
constexpr auto kPairs = PairsByTiles, kUnembed = UnembedByTiles;
constexpr void (*kSplit)(const SplitArgs&) = SplitTerms;
#else
#define ROOFLAX_TILED_FROM {kNever, kNever, kNever, kNever, kNever, \
                            kNever, kNever, kNever, kNever, kNever, kNever, kNever, kNever, kNever, kNever}
constexpr auto kBytes = Bytes;
constexpr auto kPairs = Pairs, kUnembed = Unembed;
constexpr void (*kSplit)(const SplitArgs&) = nullptr;
#endif

const Kernels kKernels = {ROOFLAX_ISA_NAME, kTileRows,   ROOFLAX_TILED_FROM, kRowOffset,
                          kShortRow,        kSplit,      OrderInputs,        Matmul,
                          MatmulPart,       AddParts,    kPairs,             kUnembed,
                          RunBefore,        Rotate,      QuantizeRow,        QuantizeGroups,
                          Narrow,           Widen,       kBytes,             Packed,
                          Attend,
                          Argmax,           Above,       ExpTotal,           ExpEach,
                          SumsAbove,        Draw,        kColumnsAtOnce,     Delta};

}  // namespace ROOFLAX_ISA
}  // namespace rooflax
