// The kernels' code, compiled once per instruction set: the including file names ROOFLAX_ISA,
// and with AVX-512 ROOFLAX_STREAMS and ROOFLAX_CODE_STREAMS, the places that a thread reads floats and codes
// from at once. ROOFLAX_TILES, ROOFLAX_DOTS and ROOFLAX_VNNI are the kernels by AMX's tiles, by AVX512-BF16's
// products of pairs and by AVX-VNNI's products of bytes alone.
//
// Vectors have sixteen lanes everywhere; a narrower machine gets them in pieces. What differs between
// instruction sets is what has an instruction of its own, as products of bytes and table look-ups,
// how many sums fit into registers, and, with AVX2, a table that several rows meet in blocks.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#if defined(ROOFLAX_TILES)
#include "tiles.h"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace rooflax {
namespace ROOFLAX_ISA {
namespace {

#include "impl_wide.h"
#include "impl_vectors.h"
#include "impl_output.h"
#if defined(ROOFLAX_DOTS)
#include "impl_terms.h"
#include "impl_dots.h"
#elif defined(ROOFLAX_TILES)
#include "impl_many.h"
#include "impl_packed.h"
#include "impl_blocks.h"
#include "impl_terms.h"
#include "impl_tiles.h"
#include "impl_tiled_matrix.h"
#include "impl_attention_tiles.h"
#elif defined(ROOFLAX_VNNI)
#include "impl_quantize.h"
#include "impl_many.h"
#include "impl_packed.h"
#include "impl_blocks.h"
#include "impl_codes.h"
#else
#include "impl_quantize.h"
#include "impl_rows.h"
#include "impl_many.h"
#include "impl_matmul.h"
#include "impl_table.h"
#include "impl_packed.h"
#include "impl_pairs.h"
#include "impl_blocks.h"
#if defined(__aarch64__)
#include "impl_neon.h"
#endif
#include "impl_codes.h"
#include "impl_attention.h"
#include "impl_whole.h"
#include "impl_delta.h"
#include "impl_adapters.h"
#endif

}  // namespace

#if defined(ROOFLAX_DOTS)
const PairKernels kPairs = {SplitTerms, PairsByDots};
#elif defined(ROOFLAX_TILES)
const TileKernels kTiles = {SplitTerms, PairsByTiles, UnembedByTiles, BytesByTiles, AttendByTiles};
#elif defined(ROOFLAX_VNNI)
const ByteKernels kBytes = {kRowOffset, QuantizeRow, QuantizeGroups, Bytes};
#else
const Kernels kKernels = {ROOFLAX_ISA_NAME, kTileRows,   false,              kRowOffset,
                          kShortRow,        nullptr,     OrderInputs,        Matmul,
                          MatmulPart,       AddParts,    MatmulTransposed,   Pairs,
                          Unembed,          RunBefore,   Rotate,             QuantizeRow,
                          QuantizeGroups,   Narrow,      Widen,              Bytes,
                          Packed,           Numbers,     Attend,             nullptr,
                          Whole,            WholeBackward, Argmax,           Above,
                          ExpTotal,         ExpEach,     SumsAbove,          Draw,
                          kColumnsAtOnce,   Delta,       Shrink,             Expand};
#endif

}  // namespace ROOFLAX_ISA
}  // namespace rooflax
