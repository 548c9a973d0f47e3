// The kernels, one table of them per instruction set. Shapes and layouts are said here once.
//
// An output is always summed in the same order of k, whatever the number of rows and however the work
// is split, so a row's result does not depend on the rows beside it.
#ifndef ROOFLAX_KERNELS_H_
#define ROOFLAX_KERNELS_H_

#include <cstdint>

namespace rooflax {

// Outputs whose weights lie side by side in a packed matrix, and inputs that share a scale.
constexpr int64_t kPanel = 16;
constexpr int64_t kGroup = 32;

enum class Width { kFloat32, kBfloat16, kFloat16, kInt8, kFp8 };

// Where a matmul goes: y[m, n] = x @ w + bias[n] + residual[m, n].
struct Output {
  void* y;  // [rows, outer]
  const float* bias;  // [outer] or null
  const void* residual;  // [rows, outer] or null
  int64_t outer;
  bool halves = false;  // y and residual are bfloat16; else float32
};

// A matmul with a matrix is summed in at most four parts of its inputs, each in one order of k, and
// the parts one after the other: so threads can share a matrix by its rows, each with a part of
// its own.
constexpr int64_t PartLength(int64_t inner) {
  const int64_t quarter = ((inner + 3) / 4 + 15) / 16 * 16;
  return quarter < 64 ? 64 : quarter;
}
constexpr int64_t NumParts(int64_t inner) {
  return inner == 0 ? 1 : (inner + PartLength(inner) - 1) / PartLength(inner);
}

constexpr int64_t kFewRows = 16;  // the most that `matmul_part` takes

// Rows of float32 as sums of at most kMostTerms rows of bfloat16, for matmuls that take those: blocks of
// kTermBlock inputs, the last filled up with zeros.
constexpr int64_t kTermBlock = 32, kMostTerms = 3;
inline int64_t NumTermBlocks(int64_t inner) { return (inner + kTermBlock - 1) / kTermBlock; }
// Panels of pairs: bfloat16 as [outer / 16, inner / 32, 16, 16, 2], the last block and panel filled up with
// zeros; a block is a tile of AMX.
constexpr int64_t kPairBlockBytes = kTermBlock * kPanel * 2;

// One row of a tile of `rows`, as terms: [blocks, num_terms, rows, kTermBlock], or, as the tile of a table
// wants them, [blocks, num_terms, kTermBlock / 2, rows, 2]. The high bits of a number, of what is left of
// it, and of what is left of that: exact, but for one term, which is the nearest. What is infinite or NaN
// is its first term.
struct SplitArgs {
  const float* x;  // [inner]
  uint16_t* terms;  // of the tile
  int64_t inner, num_terms, row, rows;
  bool table;
};

// sum over k of x[m, k] * w[k, n], for n in [begin, end).
struct MatmulArgs {
  const float* x;  // [rows, inner]; where rows of w are short, as `order_inputs` leaves them
  const void* w;  // [inner, outer]; [outer, inner] for `unembed` and `matmul_transposed`; panels for `pairs`
  Output out;
  int64_t rows, inner, begin, end;  // of `pairs` panels
  Width width;
  // Of `matmul_part` and `add_parts`: sums [parts, rows, columns from parts_begin on].
  float* parts;  // of `matmul_part`: where the sums of the part numbered `part` begin
  int64_t part, parts_begin, parts_stride, parts_size;  // from row to row, and from part to part
  // Of a kernel that takes them, and bfloat16: of each tile of kTiledRows rows, see SplitArgs.
  const uint16_t* terms;
  int64_t num_terms;
};

// What happens to a row before its matmul.
enum class Before { kNone, kRmsNorm, kLayerNorm, kSilu, kGelu, kGeluTanh, kRelu, kClampedSwiglu };

// out[inner] from a row of x. Activations that gate read [2, inner]: activation(gate) * up.
struct BeforeArgs {
  Before kind;
  bool gated;
  const float* weight;  // of a norm, [inner]
  const float* bias;  // of a LayerNorm, [inner]
  float eps;
  float alpha, limit;  // of the clamped SwiGLU: (up + 1) * gate * sigmoid(alpha * gate)
  int64_t inner;
};

// Inputs that a Hadamard matrix mixes, where a row is rotated before it is rounded.
constexpr int64_t kRotated = 64;

// Rows of float32 as int8, one scale per row: q = round(x / scale), scale = max |x| / 127.
struct QuantizeRowsArgs {
  const float* x;  // [inner]
  uint8_t* q;  // [stride]: q + row_offset; padding as q = 0
  float* scale;  // one
  int64_t inner, stride;
};

// Rows that a matmul of packed weights takes at a time, of so many that are left, by the most whose
// sums fit into registers: of the groups of 32 that these rows have, those of the same number lie
// beside each other. Nine to twelve are two tiles, each of which fetches half of the next panels.
inline int64_t TileRows(int64_t left, int64_t most) {
  if (most != 12) return left < most ? left : most;
  return left > 12 ? 12 : left > 8 ? 8 : left;
}

// Rows in a tile of AMX. Where a run of rows is multiplied by those, its bytes of kInt8 lie in tiles as
// well: [blocks of kRowBlock inputs, rows of the tile, kRowBlock], filled up with zeros.
constexpr int64_t kTiledRows = 16, kRowBlock = 64;
inline int64_t RowBytes(int64_t stride) { return (stride + kRowBlock - 1) / kRowBlock * kRowBlock; }

// One row of a tile of float32 as int8, one scale per group of 32: scale = max |x| / 127. Of two planes as whole
// numbers of 16 bits, 256 high + low with both in int8: scale = max |x| / (127 * 256).
struct QuantizeGroupsArgs {
  const float* x;  // [inner]
  int8_t* q;  // [inner / 32, rows, planes, 32], at this row; of two planes the low one first, or the same
              // bytes in an order of the kernels' own
  float* scale;  // [inner / 32, rows], at this row
  int32_t* start;  // [inner / 32, parts, rows]: sums of q over each part of a group, times `times`; where that is 0,
                   // the bits of float32: the scale times the sums
  int64_t inner, rows;  // rows of the tile
  int32_t times;
  int64_t parts;  // 1 or 2
  int64_t planes;  // 1 or 2
};

// How packed weights are coded: 16 outputs side by side, four inputs of one in a lane of 32 bits.
//   kInt8        int8 [panels, quads, 16, 4], one float32 scale per output
//   kFp8         e4m3, as kInt8
//   kInt8Groups  int8 [panels, groups, 8, 16, 4], a float16 scale per output and group
//   kInt4        [panels, groups, 4, 16, 4]: k = 4 s + j in the low half of a byte, 16 + 4 s + j in
//                the high one; value - 8, a float16 scale per output and group
//   kMxfp4       as kInt4; e2m1, a scale 2^(e - 127) per output and group
//   kFp8Groups   as kInt8Groups, e4m3; a float32 scale per output and group
//   kNf4         as kInt4; sixteen numbers of their own, a float32 scale per output and group
//   kNvfp4       as kInt4; e2m1, a float32 scale per output and half of a group, [panels, groups, 2, 16]
//   kInt6        as ggml's block types: value - 32, scales kHalf
//   the others   ggml's block types, [panels, groups, bits, 16, 4]: see impl_blocks.h and BlockScales
enum class Code {
  kInt8, kFp8, kInt8Groups, kInt4, kMxfp4,
  kQ4_1, kQ5_0, kQ5_1, kQ2K, kQ3K, kQ4K, kQ5K, kQ6K, kIq4Nl, kIq4Xs, kInt6,
  kFp8Groups, kNf4, kNvfp4
};
constexpr int kCodes = 19;

// Codes that are floats with scales in float32, which meet activations in float32 alone.
constexpr bool HasFloatScales(Code code) { return code >= Code::kFp8Groups; }
alignas(64) constexpr float kNf4Values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
    0.7229568362236023f, 1.0f};
constexpr bool IsNibbles(Code code) {
  return code == Code::kInt4 || code == Code::kMxfp4 || code == Code::kNf4 || code == Code::kNvfp4;
}

// Scales of ggml's block types, for 16 outputs:
//   kHalf   float16 [panels, groups, 16]
//   kPair   words of 32 bits [panels, groups, 16]: a float16 scale, and a float16 that is added above it
//   kSuper  words [panels, supers, 1 + groups of a super / 2, 16]: a float16 for scales and one for
//           minimums above it, then of two groups each two bytes that these are multiplied by
enum class BlockScales { kHalf, kPair, kSuper };

// What is known of a block type without its kernels.
struct BlockTraits {
  int64_t bits;  // of a code; 0 of what is no block type
  BlockScales scales;
  int64_t parts;  // of a group, that have scales of their own
};
constexpr BlockTraits TraitsOf(Code code) {
  switch (code) {
    case Code::kQ4_1: return {4, BlockScales::kPair, 1};
    case Code::kQ5_0: return {5, BlockScales::kHalf, 1};
    case Code::kQ5_1: return {5, BlockScales::kPair, 1};
    case Code::kQ2K: return {2, BlockScales::kSuper, 2};
    case Code::kQ3K: return {3, BlockScales::kSuper, 2};
    case Code::kQ4K: return {4, BlockScales::kSuper, 1};
    case Code::kQ5K: return {5, BlockScales::kSuper, 1};
    case Code::kQ6K: return {6, BlockScales::kSuper, 2};
    case Code::kIq4Nl: return {4, BlockScales::kHalf, 1};
    case Code::kIq4Xs: return {4, BlockScales::kSuper, 1};
    case Code::kInt6: return {6, BlockScales::kHalf, 1};
    default: return {0, BlockScales::kHalf, 1};
  }
}

// What the sum of a row over (a part of) a group is multiplied by where its products begin: codes in
// groups are multiplied as unsigned bytes, which are so much too large; MXFP4's are doubled, and so whole.
// 0 with minimums, which meet the sum itself, times the row's scale.
constexpr int32_t StartTimes(Code code) {
  switch (code) {
    case Code::kInt4: return -8;
    case Code::kMxfp4: return -12;
    case Code::kQ3K: return -4;
    case Code::kQ5_0: return -16;
    case Code::kQ6K: case Code::kInt6: return -32;
    case Code::kQ4_1: case Code::kQ5_1: case Code::kQ2K: case Code::kQ4K: case Code::kQ5K: return 0;
    default: return -128;
  }
}

// sum over k of x[m, k] * w[k, n], for the outputs of panels [begin, end).
struct PackedArgs {
  Code code;
  const uint8_t* w;
  const void* w_scale;  // [panels * 16] or [panels, groups, 16]
  const int32_t* w_sum;  // kInt8: [panels * 16], of the values over k
  const void* x;  // [rows, stride]: float32; for kInt8 in bytes what `quantize_row` wrote
                  // groups in bytes: what `quantize_groups` wrote of each tile
  const float* x_scale;  // in bytes: [rows] for kInt8, else of each tile [groups, rows of the tile]
  const int32_t* x_start;  // in bytes, groups, of each tile [groups, parts, rows of the tile]: what
                           // `quantize_groups` left in `start`
  Output out;
  int64_t rows, stride, inner, begin, end;  // inner inputs of stride are real
  int64_t super_groups;  // of kSuper: groups that share its float16s
  int64_t planes;  // of groups in bytes: 1 or 2, see QuantizeGroupsArgs
};

// One query: what it is, where its output goes, and the slots of its table that it sees.
struct Query {
  const float* q;  // [head_dim]
  float* out;  // [head_dim]
  int64_t first, last;  // [first, last)
  const float* sink;  // or null
  const float* bias;  // what the scores of these slots gain; or null
};

// The most that share a pass over their keys: of `attend`, which transposes kKeysAtOnce of these, and of
// `attend_halves`, which takes slots in blocks of kSlotBlock.
constexpr int64_t kQueries = 16, kKeysAtOnce = 16, kHalfQueries = 32, kSlotBlock = 32;

// Queries that share a row and a K/V head, over its blocks:
//   p = softmax over visible s of (scale * q . k[s] + bias, and the sink);  out = sum of p[s] * v[s]
// With a cap the scores are cap * tanh(scale * q . k[s] / cap) before their bias.
struct AttendArgs {
  const Query* queries;
  int64_t count;  // 1 to kQueries, or to kHalfQueries
  const uint16_t* halves;  // of `attend_halves`: the queries [count, head_dim] in bfloat16, in place of Query::q
  const void* k;  // pool [blocks, kv_heads, block_size, head_dim], at this K/V head
  const void* v;
  const float* k_scale;  // of bytes: of each token, [blocks, kv_heads, block_size], at this head
  const float* v_scale;
  const int32_t* table;  // block numbers
  float* scores;  // [count, span], scratch
  void* keys;  // [head_dim, kKeysAtOnce] of at most four bytes each, scratch; not of `attend_halves`
  int64_t span;  // from the first to the last slot that any query sees; of `attend_halves` in whole blocks
  int64_t block_stride, block_size, head_dim;  // block_stride in elements
  float scale, cap;  // cap: 0 is none
  Width width;
};

// Queries, and keys, of a tile of attention over whole sequences.
constexpr int64_t kWholeBlock = 64;

// What queries of a tile see of its keys.
enum class Sight : uint8_t { kNothing, kSome, kAll };

// A head's queries of one tile, beside the keys of its sequence. Query i sees the keys of its segment whose
// positions are above low[i] and at most high[i].
struct WholeArgs {
  int64_t head_dim;  // whole vectors
  int64_t queries, query_step;  // query_step: numbers from one of q, out, d_out and dq to the next
  const float* q;
  const int32_t *low, *high, *segments;  // [queries]
  int64_t keys, key_step;
  const float *k, *v;  // [keys, head_dim]
  const float *k_transposed, *v_transposed;  // [head_dim, key_step], filled up with zeros
  const int32_t *positions, *key_segments;  // [key_step]; no query sees what is behind the keys
  const Sight* sight;  // of each tile's keys
  const float* sink;  // or null
  float scale;
  float* out;  // of `whole_backward` it is read, as the next
  float* log_sums;  // [queries]: of the exponentials of all scores, the sink's too
  // Of `whole_backward`: the keys in [begin, end), whole tiles. It adds to dk and dv, [keys, head_dim].
  int64_t begin, end;
  const float* d_out;
  float *dq, *dk, *dv;
};

constexpr int64_t kLevels = 4;  // of `sums_above`

// The i of the largest x[i] + noise[i], the first of equals, among those that survive: x[i] above
// `least`, or equal to it with i at most `last`. The noise is -log(-log(u)), where u is 23 bits of the
// first word of threefry2x32-20 with this key and the counters (counter, i).
struct DrawArgs {
  uint32_t key[2], counter;
  const float* x;  // [count]
  int64_t count;
  float least;
  int64_t last, first;  // first: the most likely, which survives
};

constexpr int64_t kDeltaColumns = 32;  // of a matrix, the fewest that are computed together
constexpr int64_t kMostDeltaColumns = 4 * kDeltaColumns;

// The gated delta rule of one token, for some columns of a head's matrix:
//   state = exp(g) state;  state += k (beta (v - state^T k))^T;  o = state^T q
struct DeltaArgs {
  int64_t key_dim;
  int64_t columns;  // 1, 2 or 4 times kDeltaColumns
  const float* q;  // [key_dim]
  const float* k;
  const float* v;  // [columns]
  float g, beta;
  const float* from;  // [key_dim, columns], a row every from_step numbers
  float* to;  // where the new one goes, likewise; may be `from`
  int64_t from_step, to_step;
  float* o;  // [columns]
};

// x A of an adapter, [inner, width] with whole vectors of columns, over inputs [begin, end).
struct ShrinkArgs {
  const float* const* x;  // of each row its inputs
  const void* a;
  float* sums;  // [rows, width]
  int64_t rows, width, begin, end;
  bool half_weights;  // A is bfloat16; else float32
};

// y[m, n] += sum over r of few[m, r] * B[r, n] for `outputs` outputs from `first` on, whose B is in panels.
struct ExpandArgs {
  const float* few;  // a row every `stride` numbers
  const void* b;  // [panels, rank, kPanel]
  void* const* y;  // of each row all its outputs, in float32 or bfloat16
  int64_t rows, stride, rank, first, outputs, begin, end;  // of panels [begin, end)
  bool half_weights, half_sums;  // B, and y, are bfloat16
};

struct Kernels {
  const char* name;
  int64_t tile_rows;  // see TileRows
  bool tiled;  // whether runs of many rows are multiplied by tiles of AMX
  int32_t row_offset;  // what `quantize_row` adds to a byte
  int64_t short_row;  // bytes; rows of w below it are short for `matmul` and `matmul_part`
  void (*split)(const SplitArgs&);  // where matmuls with bfloat16 take terms, else null
  void (*order_inputs)(const float* x, int64_t inner, float* out);  // one row's
  void (*matmul)(const MatmulArgs&);  // any number of rows; columns from a multiple of kPanel on
  void (*matmul_part)(const MatmulArgs&);  // up to kFewRows: the sums of one part
  void (*add_parts)(const MatmulArgs&);  // writes the output from all parts' sums
  // Any number of rows, of which x is as it is, times the transpose of w [outer, inner]; summed input after input.
  void (*matmul_transposed)(const MatmulArgs&);
  void (*pairs)(const MatmulArgs&);
  void (*unembed)(const MatmulArgs&);
  void (*before)(const BeforeArgs&, const float* x, float* out);
  // Each kRotated of x times a matrix of ones and minus ones, by additions in one order.
  void (*rotate)(const float* x, int64_t count, float* out);
  void (*quantize_row)(const QuantizeRowsArgs&);
  void (*quantize_groups)(const QuantizeGroupsArgs&);
  // x as bfloat16 or float16, to nearest even; as float32 it is copied.
  void (*narrow)(const float* x, void* out, int64_t count, Width width);
  void (*widen)(const uint16_t* x, float* out, int64_t count);  // bfloat16 as float32
  void (*bytes)(const PackedArgs&);  // activations in bytes; not kFp8
  void (*packed)(const PackedArgs&);  // activations in float32
  void (*numbers)(const PackedArgs&);  // no activations: out.y is what w stands for, float32 [inner, out.outer]
  void (*attend)(const AttendArgs&);
  // Where it is not null: queries of bfloat16, pools of bfloat16, head_dim a multiple of kTermBlock.
  void (*attend_halves)(const AttendArgs&);
  void (*whole)(const WholeArgs&);
  void (*whole_backward)(const WholeArgs&);
  // Index of the largest: the first of equals, the first NaN if there is one.
  int64_t (*argmax)(const float* x, int64_t count);
  // Indices from `begin` on of values above `least`, until `room` of them are found: how many, and
  // in `begin` where to go on.
  int64_t (*above)(const float* x, int64_t* begin, int64_t end, float least, int32_t* found,
                   int64_t room);
  // sum of exp(x[i] - largest).
  float (*exp_total)(const float* x, int64_t count, float largest);
  // out[i] = exp(x[i] - largest); their sum.
  double (*exp_each)(const float* x, int64_t count, float largest, float* out);
  // For each of kLevels levels the sum of the weights whose x is above it; without weights, of ones.
  void (*sums_above)(const float* x, const float* weights, int64_t count, const float* levels,
                     double* sums);
  int64_t (*draw)(const DrawArgs&);
  int64_t delta_columns;  // whose sums fit into registers
  void (*delta)(const DeltaArgs&);
  void (*shrink)(const ShrinkArgs&);
  void (*expand)(const ExpandArgs&);
};

// What tiles of AMX do; for the rest there are the kernels of avx512_far, and of avx512 for few rows' codes.
struct TileKernels {
  void (*split)(const SplitArgs&);
  void (*pairs)(const MatmulArgs&);
  void (*unembed)(const MatmulArgs&);
  void (*bytes)(const PackedArgs&);
  void (*attend_halves)(const AttendArgs&);
};

// What products of pairs of bfloat16 (dpbf16ps of AVX512-BF16) do, of rows that are bfloat16; for the rest there are
// the kernels of avx512 or avx512_far.
struct PairKernels {
  void (*split)(const SplitArgs&);
  void (*pairs)(const MatmulArgs&);
};

// What products of bytes in 32 bits (dpbusd of AVX-VNNI) do beside AVX2; for the rest there are its kernels.
struct ByteKernels {
  int32_t row_offset;
  void (*quantize_row)(const QuantizeRowsArgs&);
  void (*quantize_groups)(const QuantizeGroupsArgs&);
  void (*bytes)(const PackedArgs&);
};

// Rows of a run from which tiles are faster: fewer are read from memory no faster, and where groups have
// scales, taking their sums out of the tiles costs as much as their products.
constexpr int64_t kInt8From = 5, kGroupsFrom = 33;
inline bool IsTiled(const Kernels& kernels, Code code, int64_t rows) {
  return kernels.tiled && rows >= (code == Code::kInt8 ? kInt8From : kGroupsFrom);
}
// The most rows of a tile of a run of so many.
inline int64_t MostRows(const Kernels& kernels, Code code, int64_t rows) {
  return IsTiled(kernels, code, rows) ? kTiledRows : kernels.tile_rows;
}

namespace generic { extern const Kernels kKernels; }
namespace avx2 { extern const Kernels kKernels; }
namespace avx2_vnni { extern const ByteKernels kBytes; }
namespace avx512 { extern const Kernels kKernels; }
namespace avx512_far { extern const Kernels kKernels; }
namespace avx512_bf16 { extern const PairKernels kPairs; }
namespace amx { extern const TileKernels kTiles; }
namespace neon_dotprod { extern const Kernels kKernels; }
namespace neon_i8mm { extern const Kernels kKernels; }

// Whether this processor has the tiles of AMX, and this process may use them.
bool HasTiles();

// Null where this processor does not have it, or there is no such name.
const Kernels* FindKernels(const char* name);

// Those of this processor by rule; those that were forced, null where none were; and which of the two holds.
// A matmul asks what was measured in between (matmul_ffi.cc).
const Kernels& DefaultKernels();
const Kernels* ForcedKernels();
const Kernels& ChosenKernels();

}  // namespace rooflax

#endif  // ROOFLAX_KERNELS_H_
