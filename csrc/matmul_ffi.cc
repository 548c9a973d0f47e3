// Linear as an XLA custom call: checks of shapes, rows prepared, the work split; nothing else.
//
//   y = before(x) @ w + bias + residual
//
// With `select`, w (and its scales, sums and bias) has a leading axis: row m's weights are those
// numbered select[m], or select[0] for all rows. Rows that share weights are run together. A bias
// with fewer members than w begins again: member i of w has the bias number i % members. A norm may
// have members too, each for as many of w's that lie together; all rows have the same.
//
// `num_rows`, where it is given, says how many leading rows are real. The others are neither read nor written.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

// Two of plain weights, every Code, and one more of plain weights.
constexpr int64_t kCodesFrom = 2;
enum class Layout : int64_t { kMatrix, kTable, kInt8, kFp8, kInt8Groups, kInt4, kMxfp4, kPairs = kCodesFrom + kCodes };
// The attribute `bytes`: activations stay, are rounded to int8, are rotated before, or are the sum of two in int8.
enum class Bytes : int64_t { kNone, kInt8, kRotated, kTwoTerms };
// By the names of ops/format_names.py.
constexpr std::pair<const char*, Layout> kLayouts[] = {
    {"matrix", Layout::kMatrix}, {"table", Layout::kTable}, {"int8", Layout::kInt8},
    {"int8-h64", Layout::kInt8},
    {"fp8", Layout::kFp8}, {"int8-g32", Layout::kInt8Groups}, {"int4", Layout::kInt4},
    {"mxfp4", Layout::kMxfp4}, {"pairs", Layout::kPairs}};
constexpr std::pair<const char*, Code> kBlockTypes[] = {
    {"q4_1", Code::kQ4_1}, {"q5_0", Code::kQ5_0}, {"q5_1", Code::kQ5_1}, {"q2_k", Code::kQ2K},
    {"q3_k", Code::kQ3K}, {"q4_k", Code::kQ4K}, {"q5_k", Code::kQ5K}, {"q6_k", Code::kQ6K},
    {"iq4_nl", Code::kIq4Nl}, {"iq4_xs", Code::kIq4Xs}, {"int6", Code::kInt6},
    {"fp8-g32", Code::kFp8Groups}, {"nf4", Code::kNf4},
    {"nvfp4", Code::kNvfp4}};

struct Weights {
  ffi::AnyBuffer w, w_scale;
  ffi::Buffer<ffi::S32> w_sum;
};

struct Inputs : Weights {
  ffi::AnyBuffer x;
  F32 bias;
  ffi::AnyBuffer residual;
  F32 norm_weight, norm_bias;
  ffi::Buffer<ffi::S32> select, num_rows;
};

// What a call multiplies with what, once its shapes are known to fit.
struct Matmul {
  Layout layout;
  bool bytes;  // activations as int8
  int64_t planes;  // of rows in bytes, see QuantizeGroupsArgs
  bool rotated;  // in bytes: rows are rotated before they are rounded, as the weights were
  bool ordered;  // inputs in the order in which a matrix is read
  bool half_rows, half_sums;  // x, and y with what is added to it, are bfloat16
  bool narrow;  // rows are rounded to bfloat16 before they meet weights of bfloat16
  int64_t num_terms;  // of bfloat16 that rows are split into; 0 where they are not
  BeforeArgs before;
  Width width = Width::kFloat32;
  int64_t rows, x_width, inner, stride, outer, groups;
  int64_t units, unit, least;  // what is split: columns or panels, in pieces of `unit`
  int64_t stack, w_bytes, scale_bytes;  // of one member of the stack
  int64_t norms;                        // members of w to one of the norm
  BlockTraits block;  // of packed weights
  int64_t super_groups = 1;  // see PackedArgs
  const Kernels* kernels = nullptr;

  bool IsPacked() const {
    return layout != Layout::kMatrix && layout != Layout::kTable && layout != Layout::kPairs;
  }
  bool IsPerOutput() const { return layout == Layout::kInt8 || layout == Layout::kFp8; }
};

Code CodeOf(Layout layout) { return static_cast<Code>(static_cast<int64_t>(layout) - kCodesFrom); }

// ---- Which kernels, of those that give the same bits ----

// Work that is measured apart: one row, up to kFewRows, and more.
constexpr int64_t kWorks = 3, kLayoutNumbers = kCodesFrom + kCodes + 1;
int64_t WorkOf(int64_t rows) { return rows <= 1 ? 0 : rows <= kFewRows ? 1 : 2; }

// Whose kernels were the fastest here, by layout, whether (packed) activations are bytes or (plain) weights
// are bfloat16, and work; null is the default.
std::atomic<const Kernels*> measured[kLayoutNumbers][2][kWorks];

// Whether they sum in the same order, whatever the shape. Without instructions that multiply and add at once,
// the bits are others.
bool HaveSameBits(const Kernels& a, const Kernels& b, Layout layout, bool form) {
  const auto is_generic = [](const Kernels& kernels) { return std::strcmp(kernels.name, "generic") == 0; };
  if (&a == &b) return true;
  if (is_generic(a) || is_generic(b)) return false;
  if (layout == Layout::kMatrix) return a.short_row == b.short_row;
  const bool splits = (layout == Layout::kPairs || (layout == Layout::kTable && (a.tiled || b.tiled))) && form;
  return !splits || a.split == b.split;
}

// Whether one kernel does a matmul's work in both.
bool IsSameWork(const Kernels& a, const Kernels& b, const Matmul& p) {
  switch (p.layout) {
    case Layout::kMatrix: return a.matmul == b.matmul;
    case Layout::kTable: return a.unembed == b.unembed;
    case Layout::kPairs: return a.pairs == b.pairs;
    default: return p.bytes ? a.bytes == b.bytes : a.packed == b.packed;
  }
}

const Kernels& KernelsFor(const Matmul& p, int64_t rows) {
  if (const Kernels* forced = ForcedKernels()) return *forced;
  const bool form = p.IsPacked() ? p.bytes : p.width == Width::kBfloat16;
  const auto& found = measured[static_cast<int64_t>(p.layout)][form][WorkOf(rows)];
  const Kernels* kernels = found.load(std::memory_order_relaxed);
  return kernels != nullptr ? *kernels : DefaultKernels();
}

bool Fits(bool condition, const char*& why, const char* reason) {
  if (!condition && why == nullptr) why = reason;
  return condition;
}

// Scales of groups, and what they are shared by.
void SetGroupScales(const Weights& in, int64_t panels, Matmul& p, const char*& why) {
  const auto type = in.w_scale.element_type();
  const auto count = static_cast<int64_t>(in.w_scale.element_count());
  const bool block = p.block.bits != 0;
  if (!block || p.block.scales != BlockScales::kSuper) {
    const bool pairs = block && p.block.scales == BlockScales::kPair;
    const Code code = CodeOf(p.layout);
    const int64_t parts = code == Code::kNvfp4 ? 2 : 1;
    Fits(count == panels * kPanel * p.groups * parts * p.stack, why, "number of scales");
    if (HasFloatScales(code)) {
      Fits(type == ffi::DataType::F32 || (parts == 2 && type == ffi::DataType::U32), why, "type of scales");
      return;
    }
    Fits(type == (pairs ? ffi::DataType::U32 : p.layout == Layout::kMxfp4 ? ffi::DataType::U8 : ffi::DataType::F16),
         why, "type of scales");
    return;
  }
  // [panels, supers, lines, 16], of which a line is the supers' own.
  const auto dims = in.w_scale.dimensions();
  if (!Fits(Rank(in.w_scale) >= 4, why, "rank of scales")) return;
  const int64_t lines = dims[dims.size() - 2], supers = dims[dims.size() - 3];
  if (!Fits(lines >= 2 && supers > 0 && p.groups % supers == 0, why, "shape of scales")) return;
  p.super_groups = p.groups / supers;
  Fits(lines == 1 + (p.super_groups + 1) / 2 && dims[dims.size() - 1] == kPanel, why, "shape of scales");
  Fits(count == panels * supers * lines * kPanel * p.stack, why, "number of scales");
  Fits(type == ffi::DataType::U32, why, "type of scales");
}

// Sizes of the packed layouts.
void SetPacked(const Weights& in, int64_t axis, Matmul& p, const char*& why) {
  const auto dims = in.w.dimensions();
  p.block = TraitsOf(CodeOf(p.layout));
  const bool nibbles = IsNibbles(CodeOf(p.layout));
  const int64_t rank = axis + (p.IsPerOutput() ? 4 : 5);
  if (!Fits(Rank(in.w) == rank, why, "rank of w")) return;
  const int64_t panels = dims[axis];
  const int64_t quads = p.IsPerOutput() ? dims[axis + 1] : dims[axis + 1] * 8;
  p.stride = quads * 4;
  p.narrow = false;
  p.groups = p.stride / kGroup;
  p.units = panels;
  p.unit = p.least = p.IsPerOutput() ? 8 : 4;
  const int64_t lines = p.block.bits != 0 ? p.block.bits : nibbles ? 4 : 8;
  Fits(dims[rank - 1] == 4 && dims[rank - 2] == kPanel, why, "shape of w");
  Fits(p.IsPerOutput() || dims[axis + 2] == lines, why, "shape of w");
  Fits((p.outer + kPanel - 1) / kPanel == panels, why, "outputs of w");
  Fits(p.IsPerOutput() ? p.inner <= p.stride && p.stride - p.inner < 4 : p.inner == p.stride, why,
       "inputs of w");
  const auto type = in.w.element_type();
  Fits(type == ffi::DataType::S8 || type == ffi::DataType::U8, why, "type of w");
  if (p.IsPerOutput()) {
    Fits(static_cast<int64_t>(in.w_scale.element_count()) == panels * kPanel * p.stack, why, "number of scales");
    Fits(in.w_scale.element_type() == ffi::DataType::F32, why, "type of scales");
  } else {
    SetGroupScales(in, panels, p, why);
  }
  const int64_t sums = p.layout == Layout::kInt8 ? panels * kPanel * p.stack : 0;
  Fits(static_cast<int64_t>(in.w_sum.element_count()) == sums, why, "number of sums");
  Fits(!(p.bytes && (p.layout == Layout::kFp8 || HasFloatScales(CodeOf(p.layout)))), why,
       "floats with activations in bytes");
  Fits(!p.rotated || (p.layout == Layout::kInt8 && p.inner % kRotated == 0), why, "rotated inputs");
  Fits(p.planes == 1 || !p.IsPerOutput(), why, "activations of two in int8 without groups");
}

void SetPlain(const Inputs& in, int64_t axis, Matmul& p, const char*& why) {
  const bool table = p.layout == Layout::kTable, pairs = p.layout == Layout::kPairs;
  if (!Fits(Rank(in.w) == axis + (pairs ? 5 : 2), why, "rank of w")) return;
  Fits(WidthOf(in.w.element_type(), p.width) && IsPlain(p.width), why, "type of w");
  Fits(!p.bytes && !p.rotated, why, "activations in bytes");
  const bool halves = p.width == Width::kBfloat16;
  const Kernels& kernels = ChosenKernels();  // what is asked here is as much those of the others with the same bits
  p.narrow = p.narrow && halves;
  p.stride = p.inner;
  p.groups = 0;
  if (pairs) {
    const int64_t panels = (p.outer + kPanel - 1) / kPanel;
    Fits(halves, why, "type of w");
    Fits(Dim(in.w, axis) == panels, why, "outputs of w");
    Fits(Dim(in.w, axis + 1) == NumTermBlocks(p.inner), why, "inputs of w");
    Fits(Dim(in.w, axis + 2) == kTermBlock / 2 && Dim(in.w, axis + 3) == kPanel && Dim(in.w, axis + 4) == 2, why,
         "shape of w");
    p.units = panels;
    p.unit = p.least = 4;
  } else {
    const int64_t row_bytes = p.outer * (p.width == Width::kFloat32 ? 4 : 2);
    Fits(Dim(in.w, axis + (table ? 1 : 0)) == p.inner, why, "inputs of w");
    Fits(Dim(in.w, axis + (table ? 0 : 1)) == p.outer, why, "outputs of w");
    p.ordered = !table && row_bytes < kernels.short_row;
    p.units = p.outer;
    p.unit = table ? 48 : 32;
    p.least = table ? 48 : 64;
  }
  // Three terms pay by tiles alone, as does a table.
  const bool terms = halves && (kernels.tiled ? table || pairs : pairs && p.narrow && kernels.split != nullptr);
  p.num_terms = !terms ? 0 : p.narrow ? 1 : kMostTerms;
}

// What is wrong with the shapes, or null.
const char* Check(const Inputs& in, const ffi::AnyBuffer& y, Matmul& p) {
  const char* why = nullptr;
  const auto is_half = [](const ffi::AnyBuffer& buffer, bool& half) {
    half = buffer.element_type() == ffi::DataType::BF16;
    return half || buffer.element_type() == ffi::DataType::F32;
  };
  Fits(is_half(in.x, p.half_rows), why, "type of x");
  Fits(is_half(y, p.half_sums), why, "type of y");
  bool half_residual = false;
  Fits(is_half(in.residual, half_residual), why, "type of residual");
  Fits(in.residual.element_count() == 0 || half_residual == p.half_sums, why, "type of residual");
  if (!Fits(Rank(in.x) == 2 && Rank(y) == 2, why, "rank of x")) return why;
  p.rows = Dim(in.x, 0);
  p.x_width = Dim(in.x, 1);
  p.inner = p.before.gated ? p.x_width / 2 : p.x_width;
  p.outer = Dim(y, 1);
  p.before.inner = p.inner;
  const int64_t selected = static_cast<int64_t>(in.select.element_count());
  const int64_t axis = selected == 0 ? 0 : 1;
  p.stack = selected == 0 || Rank(in.w) == 0 ? 1 : Dim(in.w, 0);
  Fits(selected <= 1 || selected == p.rows, why, "select");
  Fits(Dim(y, 0) == p.rows && p.inner * (p.before.gated ? 2 : 1) == p.x_width, why, "shape of x");
  p.IsPacked() ? SetPacked(in, axis, p, why) : SetPlain(in, axis, p, why);
  const int64_t bias = static_cast<int64_t>(in.bias.element_count());
  Fits(bias == 0 || (p.outer > 0 && bias % p.outer == 0 && p.stack % (bias / p.outer) == 0), why,
       "bias");
  Fits(in.residual.element_count() == 0 || (SameShape(in.residual, y) && selected <= 1), why,
       "residual");
  const bool layer = p.before.kind == Before::kLayerNorm;
  const bool normed = layer || p.before.kind == Before::kRmsNorm;
  const int64_t norm = static_cast<int64_t>(in.norm_weight.element_count());
  const int64_t norms = p.inner == 0 ? 0 : norm / p.inner;
  Fits(normed ? norms > 0 && norms * p.inner == norm && p.stack % norms == 0 : norm == 0, why,
       "norm");
  Fits(static_cast<int64_t>(in.norm_bias.element_count()) == (layer ? norm : 0), why, "norm");
  Fits(p.stack > 0 && p.outer > 0, why, "an empty w");
  int64_t real = 0;
  Fits(RealRows(in.num_rows, p.rows, real), why, "number of rows");
  if (why != nullptr) return why;
  p.rows = real;
  for (int64_t i = 0; i < (selected == 1 ? 1 : selected == 0 ? 0 : real); ++i) {
    const int32_t number = in.select.typed_data()[i];
    if (number < 0 || number >= p.stack) return "an index outside the stack of w";
  }
  p.w_bytes = static_cast<int64_t>(in.w.size_bytes()) / p.stack;
  p.scale_bytes = static_cast<int64_t>(in.w_scale.size_bytes()) / p.stack;
  p.norms = normed ? p.stack / norms : p.stack;
  p.before.weight = OrNull(in.norm_weight);
  p.before.bias = OrNull(in.norm_bias);
  return nullptr;
}

// Rows ready for their matmul, the order in which they lie there, and where their tile begins and ends.
struct Prepared {
  std::vector<float> wide, scale;
  std::vector<uint16_t> terms;
  std::vector<uint8_t> bytes;
  std::vector<int32_t> start;
  std::vector<int64_t> order, tile_begin, tile_end, run_begin, run_end;
};

// Rows [begin, end) of the prepared order share the weights numbered `member`.
struct Run {
  int64_t begin, end, member;
};

std::vector<Run> RunsOf(const Inputs& in, const Matmul& p, std::vector<int64_t>& order) {
  order.resize(static_cast<size_t>(p.rows));
  std::iota(order.begin(), order.end(), 0);
  const int64_t selected = static_cast<int64_t>(in.select.element_count());
  const auto member = [&](int64_t row) {
    if (selected == 0) return int64_t{0};
    return int64_t{in.select.typed_data()[selected == 1 ? 0 : row]};
  };
  if (selected > 1) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return member(a) < member(b); });
  }
  std::vector<Run> runs;
  for (int64_t i = 0; i < p.rows; ++i) {
    const int64_t now = member(order[i]);
    if (runs.empty() || runs.back().member != now) runs.push_back({i, 0, now});
    runs.back().end = i + 1;
  }
  return runs;
}

// The norm that belongs to the first run's weights.
BeforeArgs BeforeOf(const Matmul& p, const std::vector<Run>& runs) {
  BeforeArgs before = p.before;
  const int64_t skipped = runs.empty() ? 0 : runs[0].member / p.norms * p.inner;
  if (before.weight != nullptr) before.weight += skipped;
  if (before.bias != nullptr) before.bias += skipped;
  return before;
}

// Where the rows of a run that begins with row `first` lie, as bytes of kInt8.
int64_t BytesAt(const Matmul& p, int64_t first) { return first * RowBytes(p.stride); }

// Row i as bytes of kInt8: whole, or as one of a tile of rows.
void QuantizeRow(const Matmul& p, const float* x, int64_t i, Prepared& out) {
  const Kernels& kernels = *p.kernels;
  if (p.rotated) {
    static thread_local std::vector<float> rotated;
    rotated.resize(static_cast<size_t>(p.inner));
    kernels.rotate(x, p.inner, rotated.data());
    x = rotated.data();
  }
  const int64_t tile = out.tile_begin[i], count = out.tile_end[i] - tile, run = out.run_begin[i];
  if (!IsTiled(kernels, Code::kInt8, out.run_end[i] - run)) {
    uint8_t* q = out.bytes.data() + BytesAt(p, run) + (i - run) * p.stride;
    return kernels.quantize_row({x, q, out.scale.data() + i, p.inner, p.stride});
  }
  static thread_local std::vector<uint8_t> own;
  own.assign(static_cast<size_t>(RowBytes(p.stride)), 0);
  kernels.quantize_row({x, own.data(), out.scale.data() + i, p.inner, p.stride});
  uint8_t* to = out.bytes.data() + BytesAt(p, tile) + (i - tile) * kRowBlock;
  for (int64_t k = 0; k < p.stride; k += kRowBlock, to += count * kRowBlock) {
    std::copy(own.data() + k, own.data() + k + kRowBlock, to);
  }
}

// To the nearest number of bfloat16, ties to even; NaN stays NaN.
void RoundToBfloat16(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    const bool fault = (bits & 0x7fffffffu) > 0x7f800000u;
    bits = fault ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
    bits &= 0xffff0000u;
    std::memcpy(x + i, &bits, sizeof(bits));
  }
}

// Of the terms of a row.
int64_t TermNumbers(const Matmul& p) { return NumTermBlocks(p.inner) * kTermBlock * p.num_terms; }

// Inputs [begin, begin + count) of row i of x in float32; where a gate is before the matmul, its and then the others'.
const float* WideInputs(const Inputs& in, const Matmul& p, int64_t i, int64_t begin, int64_t count) {
  const int64_t parts = p.before.gated ? 2 : 1, at = i * p.x_width + begin;
  const auto* floats = static_cast<const float*>(in.x.untyped_data()) + at;
  const bool together = parts == 1 || count == p.inner;
  if (!p.half_rows && together) return floats;
  static thread_local std::vector<float> wide;
  wide.resize(static_cast<size_t>(parts * count));
  const auto* halves = static_cast<const uint16_t*>(in.x.untyped_data()) + at;
  if (together) {
    p.kernels->widen(halves, wide.data(), parts * count);
    return wide.data();
  }
  for (int64_t part = 0; part < parts; ++part) {
    float* to = wide.data() + part * count;
    if (p.half_rows) {
      p.kernels->widen(halves + part * p.inner, to, count);
    } else {
      std::copy(floats + part * p.inner, floats + part * p.inner + count, to);
    }
  }
  return wide.data();
}

// Inputs of several rows that are prepared together, so that their terms, which alternate, stay in the first cache.
constexpr int64_t kSplitTogether = 16 * kTermBlock;

// Rows [begin, end) as terms. A norm has to see whole rows, an activation does not.
void SplitRows(const Inputs& in, const Matmul& p, const BeforeArgs& before, int64_t begin, int64_t end, Prepared& out) {
  const Kernels& kernels = *p.kernels;
  const bool normed = before.kind == Before::kRmsNorm || before.kind == Before::kLayerNorm;
  const int64_t together = normed ? p.inner : kSplitTogether;
  static thread_local std::vector<float> own;
  for (int64_t k = 0; k < p.inner; k += together) {
    BeforeArgs part = before;
    part.inner = std::min(together, p.inner - k);
    for (int64_t i = begin; i < end; ++i) {
      const float* x = WideInputs(in, p, out.order[i], k, part.inner);
      if (before.kind != Before::kNone) {
        own.resize(static_cast<size_t>(part.inner));
        kernels.before(part, x, own.data());
        x = own.data();
      }
      const int64_t tile = out.tile_begin[i], rows = out.tile_end[i] - tile;
      uint16_t* terms = out.terms.data() + tile * TermNumbers(p) + k * p.num_terms * rows;
      kernels.split({x, terms, part.inner, p.num_terms, i - tile, rows, p.layout == Layout::kTable});
    }
  }
}

// Row i of x in groups of int8, each with its scale.
void QuantizeGroups(const Matmul& p, const float* x, int64_t i, Prepared& out) {
  const int64_t tile = out.tile_begin[i], row = i - tile, first = tile * p.groups + row;
  auto* q = reinterpret_cast<int8_t*>(out.bytes.data()) + (tile * p.stride + row * kGroup) * p.planes;
  int32_t* start = out.start.data() + tile * p.groups * p.block.parts + row;
  p.kernels->quantize_groups({x, q, out.scale.data() + first, start, p.inner, out.tile_end[i] - tile,
                              StartTimes(CodeOf(p.layout)), p.block.parts, p.planes});
}

void PrepareRow(const Inputs& in, const Matmul& p, const BeforeArgs& before, int64_t i,
                Prepared& out) {
  const Kernels& kernels = *p.kernels;
  const float* x = WideInputs(in, p, out.order[i], 0, p.inner);
  if (!out.wide.empty()) {
    static thread_local std::vector<float> own;
    float* wide = out.wide.data() + i * p.inner;
    if (p.ordered) own.resize(static_cast<size_t>(p.inner));
    float* to = p.ordered ? own.data() : wide;
    if (!p.ordered || before.kind != Before::kNone) {
      kernels.before(before, x, to);
      if (p.narrow) RoundToBfloat16(to, p.inner);
      x = to;
    }
    if (p.ordered) kernels.order_inputs(x, p.inner, wide);
    x = wide;
  }
  if (!p.bytes) return;
  if (p.layout == Layout::kInt8) return QuantizeRow(p, x, i, out);
  QuantizeGroups(p, x, i, out);
}

void SetTiles(const std::vector<Run>& runs, const Matmul& p, Prepared& out) {
  const auto rows = static_cast<size_t>(p.rows);
  out.tile_begin.resize(rows);
  out.tile_end.resize(rows);
  out.run_begin.resize(rows);
  out.run_end.resize(rows);
  for (const Run& run : runs) {
    std::fill(out.run_begin.begin() + run.begin, out.run_begin.begin() + run.end, run.begin);
    std::fill(out.run_end.begin() + run.begin, out.run_end.begin() + run.end, run.end);
    const int64_t most = p.bytes ? MostRows(*p.kernels, CodeOf(p.layout), (run.end - run.begin) * p.planes) : kTiledRows;
    for (int64_t begin = run.begin, end; begin < run.end; begin = end) {
      end = begin + TileRows(run.end - begin, most);
      std::fill(out.tile_begin.begin() + begin, out.tile_begin.begin() + end, begin);
      std::fill(out.tile_end.begin() + begin, out.tile_end.begin() + end, end);
    }
  }
}

// Columns [begin, end) of few rows times a matrix, part after part.
void MultiplyParts(const Kernels& kernels, MatmulArgs args, int64_t count) {
  static thread_local std::vector<float> parts;
  args.parts_begin = args.begin;
  args.parts_stride = args.end - args.begin + 16;
  args.parts_size = args.rows * args.parts_stride;
  parts.resize(static_cast<size_t>(count * args.parts_size));
  for (args.part = 0; args.part < count; ++args.part) {
    args.parts = parts.data() + args.part * args.parts_size;
    kernels.matmul_part(args);
  }
  args.parts = parts.data();
  kernels.add_parts(args);
}

// Where one run's matmul with a matrix or a table comes from and goes to.
MatmulArgs PlainArgs(const Inputs& in, const Matmul& p, const Prepared& rows, const Run& run,
                     const Output& out, int64_t begin, int64_t end) {
  const auto* w = static_cast<const uint8_t*>(in.w.untyped_data()) + run.member * p.w_bytes;
  const float* x = rows.wide.empty() ? static_cast<const float*>(in.x.untyped_data()) : rows.wide.data();
  MatmulArgs args{};
  args.x = x + run.begin * p.inner;
  args.w = w;
  args.out = out;
  args.rows = run.end - run.begin;
  args.inner = p.inner;
  args.begin = begin;
  args.end = end;
  args.width = p.width;
  args.num_terms = p.num_terms;
  if (p.num_terms > 0) args.terms = rows.terms.data() + run.begin * TermNumbers(p);
  return args;
}

int64_t SumBytes(const Matmul& p) { return p.half_sums ? 2 : 4; }

Output OutputOf(const Inputs& in, const Matmul& p, const Run& run, char* y) {
  const float* bias = OrNull(in.bias);
  const int64_t biases = static_cast<int64_t>(in.bias.element_count()) / p.outer;
  if (biases > 1) bias += run.member % biases * p.outer;
  const int64_t skipped = run.begin * p.outer * SumBytes(p);
  const bool adds = in.residual.element_count() > 0;
  const char* residual = adds ? static_cast<const char*>(in.residual.untyped_data()) + skipped : nullptr;
  return {y + skipped, bias, residual, p.outer, p.half_sums};
}

// What is known of packed weights without their rows.
PackedArgs PackedOf(const Weights& in, const Matmul& p, int64_t member) {
  PackedArgs args{};
  args.code = CodeOf(p.layout);
  args.w = static_cast<const uint8_t*>(in.w.untyped_data()) + member * p.w_bytes;
  args.w_scale = static_cast<const char*>(in.w_scale.untyped_data()) + member * p.scale_bytes;
  args.stride = p.stride;
  args.inner = p.inner;
  args.super_groups = p.super_groups;
  return args;
}

// Columns or panels [begin, end) of one run's matmul.
void Multiply(const Inputs& in, const Matmul& p, const Prepared& rows, const Run& run, char* y,
              int64_t begin, int64_t end) {
  const Kernels& kernels = *p.kernels;
  const Output out = OutputOf(in, p, run, y);
  const int64_t count = run.end - run.begin;
  if (!p.IsPacked()) {
    const MatmulArgs args = PlainArgs(in, p, rows, run, out, begin, end);
    if (p.layout == Layout::kPairs) return kernels.pairs(args);
    if (p.layout == Layout::kTable) return kernels.unembed(args);
    return count <= kFewRows ? MultiplyParts(kernels, args, NumParts(p.inner)) : kernels.matmul(args);
  }
  const float* wide = rows.wide.empty() ? static_cast<const float*>(in.x.untyped_data()) : rows.wide.data();
  wide += run.begin * p.inner;
  PackedArgs args = PackedOf(in, p, run.member);
  if (p.layout == Layout::kInt8) {
    args.w_sum = in.w_sum.typed_data() + run.member * p.units * kPanel;
  }
  args.out = out;
  args.rows = count;
  args.begin = begin;
  args.end = end;
  args.x = wide;
  if (!p.bytes) return kernels.packed(args);
  const int64_t scales = p.layout == Layout::kInt8 ? 1 : p.groups;
  args.planes = p.planes;
  args.x = rows.bytes.data() +
           (p.layout == Layout::kInt8 ? BytesAt(p, run.begin) : run.begin * p.stride * p.planes);
  args.x_scale = rows.scale.data() + run.begin * scales;
  args.x_start = rows.start.data() + (rows.start.empty() ? 0 : run.begin * scales * p.block.parts);
  kernels.bytes(args);
}

// Rows up to which reading a matrix takes longer than multiplying with it.
constexpr int64_t kStreamedRows = 8;
constexpr int64_t kShared = 65536;  // sums that are worth more than one thread to add up

bool IsStreamed(const Matmul& p, const std::vector<Run>& runs) {
  const auto few = [](const Run& run) { return run.end - run.begin <= kStreamedRows; };
  return p.layout == Layout::kMatrix && std::all_of(runs.begin(), runs.end(), few);
}

// Few rows times matrices: threads take parts of the inputs, which lie together, not of the outputs.
template <typename Parallel>
void Stream(const Inputs& in, const Matmul& p, const Prepared& rows, const std::vector<Run>& runs,
            char* y, int64_t threads, const Parallel& parallel) {
  static thread_local std::vector<float> shared;
  // A line more than the columns: rows a multiple of 4096 bytes apart would share a cache's sets.
  const int64_t stride = (p.outer + 31) / 16 * 16;
  const int64_t parts = NumParts(p.inner), size = p.rows * stride;
  shared.resize(static_cast<size_t>(parts * size));
  float* sums = shared.data();
  const int64_t wanted = (2 * threads + parts - 1) / parts;
  const int64_t width = std::max<int64_t>(64, ((p.outer + wanted - 1) / wanted + 31) / 32 * 32);
  const int64_t pieces = (p.outer + width - 1) / width;
  const auto args_of = [&](const Run& run, int64_t piece) {
    const int64_t begin = piece * width, end = std::min(p.outer, begin + width);
    MatmulArgs args = PlainArgs(in, p, rows, run, OutputOf(in, p, run, y), begin, end);
    args.parts = sums + run.begin * stride;
    args.parts_stride = stride;
    args.parts_size = size;
    return args;
  };
  const int64_t items = static_cast<int64_t>(runs.size()) * pieces;
  parallel(items * parts, [&](int64_t item) {
    MatmulArgs args = args_of(runs[item / parts / pieces], item / parts % pieces);
    args.part = item % parts;
    args.parts += args.part * size;
    p.kernels->matmul_part(args);
  });
  const auto finish = [&](int64_t item) {
    p.kernels->add_parts(args_of(runs[item / pieces], item % pieces));
  };
  if (parts * size > kShared) return parallel(items, finish);
  for (int64_t item = 0; item < items; ++item) finish(item);
}

template <typename Pool>
void Compute(Pool& pool, const Inputs& in, Matmul p, char* y) {
  static thread_local Prepared rows;
  static thread_local std::vector<char> sorted;
  const std::vector<Run> runs = RunsOf(in, p, rows.order);
  if (p.kernels == nullptr) p.kernels = &KernelsFor(p, p.rows * p.planes / static_cast<int64_t>(runs.size()));
  const bool moved = runs.size() > 1;
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  const bool split = p.num_terms > 0;
  const bool copied = p.before.kind != Before::kNone || p.ordered;
  const bool wide = !split && (copied || ((moved || p.half_rows) && !p.bytes));
  const int64_t y_bytes = p.outer * SumBytes(p);
  const auto grow = [&](auto& numbers, int64_t n) { numbers.resize(std::max(numbers.size(), size(n))); };
  if (split) grow(rows.terms, p.rows * TermNumbers(p));  // never made smaller: what grows again is cleared first
  rows.wide.resize(wide ? size(p.rows * p.inner) : 0);
  if (p.bytes) {
    grow(rows.bytes, p.rows * p.planes * RowBytes(p.stride));
    grow(rows.scale, p.rows * std::max<int64_t>(1, p.groups));
  }
  rows.start.resize(p.bytes && !p.IsPerOutput() ? size(p.rows * p.groups * p.block.parts) : 0);
  if (p.bytes || p.num_terms > 0) SetTiles(runs, p, rows);
  if (moved) sorted.resize(size(p.rows * y_bytes));
  char* to = moved ? sorted.data() : y;

  const int64_t threads = ThreadsFor(pool, p.rows * p.inner * p.outer);
  const auto schedule = [&](auto task) { pool.Schedule(std::move(task)); };
  if (wide || p.bytes || split) {
    Prepared& shared = rows;
    const BeforeArgs before = BeforeOf(p, runs);
    // Terms of several rows lie in a line of the cache.
    const int64_t together = split ? 8 : std::clamp<int64_t>(p.rows / (2 * threads) / 2 * 2, 2, 8);
    ParallelFor((p.rows + together - 1) / together, threads, schedule, [&](int64_t piece) {
      const int64_t begin = piece * together, end = std::min(p.rows, begin + together);
      if (split) return SplitRows(in, p, before, begin, end, shared);
      for (int64_t i = begin; i < end; ++i) PrepareRow(in, p, before, i, shared);
    });
  }
  const Prepared& ready = rows;
  const auto parallel = [&](int64_t count, const auto& work) {
    ParallelFor(count, threads, schedule, work);
  };
  if (IsStreamed(p, runs)) {
    Stream(in, p, ready, runs, to, threads, parallel);
  } else {
    const bool many = p.rows > kFewRows * static_cast<int64_t>(runs.size());
    const bool copies = many && (p.layout == Layout::kMatrix || (p.IsPacked() && !p.bytes));
    const std::vector<int64_t> ends = copies ? FewPieces(p.units, p.unit, p.least, threads)
                                             : Pieces(p.units, p.unit, p.least, 2 * threads);
    const auto count = static_cast<int64_t>(runs.size());
    parallel(static_cast<int64_t>(ends.size()) * count, [&](int64_t item) {
      const int64_t piece = item / count, begin = piece == 0 ? 0 : ends[piece - 1];
      Multiply(in, p, ready, runs[item % count], to, begin, ends[piece]);
    });
  }
  for (int64_t i = 0; moved && i < p.rows; ++i) {
    std::copy(to + i * y_bytes, to + (i + 1) * y_bytes, y + rows.order[i] * y_bytes);
  }
}

ffi::Error Call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer w_scale,
                ffi::Buffer<ffi::S32> w_sum, F32 bias, ffi::AnyBuffer residual, F32 norm_weight,
                F32 norm_bias, ffi::Buffer<ffi::S32> select, ffi::Buffer<ffi::S32> num_rows,
                ffi::Result<ffi::AnyBuffer> y, int64_t layout, int64_t bytes, int64_t narrow, int64_t before,
                int64_t gated, float eps, float alpha, float limit) {
  Matmul product{};
  if (layout < 0 || layout >= kLayoutNumbers || bytes < 0 || bytes > static_cast<int64_t>(Bytes::kTwoTerms)) {
    return Reject("matmul: attributes");
  }
  if (!SetBefore(before, gated, eps, alpha, limit, product.before)) return Reject("matmul: what comes before");
  const Inputs in{{w, w_scale, w_sum}, x, bias, residual, norm_weight, norm_bias, select, num_rows};
  product.layout = static_cast<Layout>(layout);
  product.bytes = static_cast<Bytes>(bytes) != Bytes::kNone;
  product.rotated = static_cast<Bytes>(bytes) == Bytes::kRotated;
  product.planes = static_cast<Bytes>(bytes) == Bytes::kTwoTerms ? 2 : 1;
  product.narrow = narrow != 0;
  if (const char* why = Check(in, *y, product)) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("rooflax matmul: ") + why);
  }
  TheComputed().matmul_rows.fetch_add(product.rows, std::memory_order_relaxed);
  if (product.rows > 0) Compute(pool, in, product, static_cast<char*>(y->untyped_data()));
  return ffi::Error::Success();
}

// y [inner, outer] is what packed weights, or the selected of a stack of them, stand for. `after` is not read: the call
// waits for it.
ffi::Error Numbers(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::AnyBuffer w_scale, ffi::Buffer<ffi::S32> w_sum,
                   ffi::Buffer<ffi::S32> select, F32, ffi::Result<F32> y, int64_t layout) {
  Matmul p{};
  p.layout = static_cast<Layout>(layout);
  p.planes = 1;
  const auto selected = static_cast<int64_t>(select.element_count());
  if (layout < 0 || layout >= kLayoutNumbers || !p.IsPacked()) return Reject("numbers: attributes");
  if (Rank(*y) != 2 || selected > 1 || Rank(w) < 1) return Reject("numbers: shapes");
  p.inner = Dim(*y, 0);
  p.outer = Dim(*y, 1);
  p.stack = selected == 0 ? 1 : Dim(w, 0);
  const int64_t member = selected == 0 ? 0 : select.typed_data()[0];
  if (member < 0 || member >= p.stack) return Reject("numbers: an index outside the stack of w");
  const Weights in{w, w_scale, w_sum};
  const char* why = nullptr;
  SetPacked(in, selected, p, why);
  if (why != nullptr) return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("rooflax numbers: ") + why);
  p.w_bytes = static_cast<int64_t>(w.size_bytes()) / p.stack;
  p.scale_bytes = static_cast<int64_t>(w_scale.size_bytes()) / p.stack;
  const PackedArgs all = PackedOf(in, p, member);
  const Kernels& kernels = ChosenKernels();
  constexpr int64_t kPiece = 8;  // panels
  ParallelFor(
      (p.units + kPiece - 1) / kPiece, ThreadsFor(pool, p.inner * p.outer),
      [&](auto task) { pool.Schedule(std::move(task)); },
      [&](int64_t piece) {
        PackedArgs args = all;
        args.out = {y->typed_data(), nullptr, nullptr, p.outer};
        args.begin = piece * kPiece;
        args.end = std::min(p.units, args.begin + kPiece);
        kernels.numbers(args);
      });
  return ffi::Error::Success();
}

// ---- Timing ----

// In place of XLA's pool.
struct OwnThreads {
  int64_t count;
  std::vector<std::thread> running;
  int64_t num_threads() const { return count; }
  template <typename Task>
  void Schedule(Task task) { running.emplace_back(std::move(task)); }
  ~OwnThreads() {
    for (auto& thread : running) thread.join();
  }
};

struct Array {
  XLA_FFI_Buffer buffer{};
  Array(const void* data, ffi::DataType type, int64_t* dims, int64_t rank) {
    buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer.dtype = static_cast<XLA_FFI_DataType>(type);
    buffer.data = const_cast<void*>(data);
    buffer.rank = rank;
    buffer.dims = dims;
  }
};

const ffi::DataType* TypeNamed(const char* name) {
  static constexpr std::pair<const char*, ffi::DataType> kTypes[] = {
      {"int8", ffi::DataType::S8}, {"uint8", ffi::DataType::U8}, {"uint32", ffi::DataType::U32},
      {"int32", ffi::DataType::S32}, {"float16", ffi::DataType::F16}, {"bfloat16", ffi::DataType::BF16},
      {"float32", ffi::DataType::F32}};
  for (const auto& type : kTypes) {
    if (std::strcmp(type.first, name) == 0) return &type.second;
  }
  return nullptr;
}

}  // namespace

ROOFLAX_HANDLER(rooflax_matmul, Call,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Arg<F32>().Arg<ffi::AnyBuffer>()
                    .Arg<F32>().Arg<F32>().Arg<ffi::Buffer<ffi::S32>>()
                    .Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>()
                    .Attr<int64_t>("layout").Attr<int64_t>("bytes").Attr<int64_t>("narrow")
                    .Attr<int64_t>("before").Attr<int64_t>("gated").Attr<float>("eps").Attr<float>("alpha")
                    .Attr<float>("limit"));

ROOFLAX_HANDLER(rooflax_numbers, Numbers,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                    .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>().Arg<F32>().Ret<F32>()
                    .Attr<int64_t>("layout"));

}  // namespace rooflax

// Each 64 of x rotated.
extern "C" __attribute__((visibility("default"))) void rooflax_rotate(const float* x, int64_t count, float* out) {
  rooflax::ChosenKernels().rotate(x, count, out);
}

extern "C" {

// An array of weights: pieces of so many bytes, each of this type and shape.
struct rooflax_pieces {
  const char* data;
  const char* type;
  int64_t* dims;
  int64_t rank, bytes;
};

// The least seconds in which a variant multiplies rows by one of `count` pieces of w, which it reads one after the
// other; the first is not timed. Negative where this processor lacks it, where the bits are not the default's or it is
// the default by another name, or where arrays do not fit: w, its scales and its sums.
__attribute__((visibility("default"))) double rooflax_time_matmul(const char* variant, int64_t layout, int bytes, int64_t rows, int64_t inner, int64_t outer, const rooflax_pieces* arrays, int64_t count, int threads) {
  using namespace rooflax;
  const Kernels* kernels = FindKernels(variant);
  if (kernels == nullptr || count < 2 || rows < 1 || inner < 1 || outer < 1) return -1;
  if (layout < 0 || layout >= kLayoutNumbers) return -1;
  static thread_local std::vector<float> x, y;
  x.resize(static_cast<size_t>(rows * inner));
  y.resize(static_cast<size_t>(rows * outer));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int64_t>(i * 37 % 101) - 50);
  OwnThreads pool{threads, {}};
  std::chrono::duration<double> least{1e9};
  for (int64_t piece = 0; piece < count; ++piece) {
    int64_t none = 0, of_x[] = {rows, inner}, of_y[] = {rows, outer};
    const Array given(x.data(), ffi::DataType::F32, of_x, 2), found(y.data(), ffi::DataType::F32, of_y, 2);
    const Array no_floats(nullptr, ffi::DataType::F32, &none, 1), no_numbers(nullptr, ffi::DataType::S32, &none, 1);
    std::vector<Array> weights;
    for (const rooflax_pieces* array = arrays; array < arrays + 3; ++array) {
      const ffi::DataType* type = TypeNamed(array->type);
      if (type == nullptr) return -1;
      weights.emplace_back(array->data + piece * array->bytes, *type, array->dims, array->rank);
    }
    const ffi::AnyBuffer floats(&no_floats.buffer);
    const Inputs in{{ffi::AnyBuffer(&weights[0].buffer), ffi::AnyBuffer(&weights[1].buffer),
                     ffi::Buffer<ffi::S32>(&weights[2].buffer)},
                    ffi::AnyBuffer(&given.buffer), F32(&no_floats.buffer), floats,
                    F32(&no_floats.buffer), F32(&no_floats.buffer), ffi::Buffer<ffi::S32>(&no_numbers.buffer),
                    ffi::Buffer<ffi::S32>(&no_numbers.buffer)};
    Matmul product{};
    product.layout = static_cast<Layout>(layout);
    product.bytes = bytes != 0;
    product.planes = 1;
    product.kernels = kernels;
    if (Check(in, ffi::AnyBuffer(&found.buffer), product) != nullptr) return -1;
    const bool form = product.IsPacked() ? product.bytes : product.width == Width::kBfloat16;
    const Kernels& own = DefaultKernels();
    if (!HaveSameBits(*kernels, own, product.layout, form)) return -1;
    const bool is_own = kernels == &own;
    if (!is_own && (IsSameWork(*kernels, own, product) || std::strcmp(variant, "avx512-bf16") == 0)) return -1;
    const bool by_tiles = product.IsPacked() && product.bytes && IsTiled(own, CodeOf(product.layout), rows);
    const char* const beneath = product.IsPacked() && product.bytes ? "avx512" : "avx512-far";  // of tiles
    if (own.tiled && !by_tiles && std::strcmp(variant, beneath) == 0) return -1;
    const auto start = std::chrono::steady_clock::now();
    Compute(pool, in, product, reinterpret_cast<char*>(y.data()));
    if (piece > 0) least = std::min<std::chrono::duration<double>>(least, std::chrono::steady_clock::now() - start);
  }
  return least.count();
}

// Makes a variant that of a layout's matmuls: `form` as 1 where activations are bytes, or plain weights bfloat16;
// `work` one row, few or many. 0 where its bits are not the default's.
__attribute__((visibility("default"))) int rooflax_prefer(const char* variant, int64_t layout, int form, int work) {
  using namespace rooflax;
  const Kernels* kernels = FindKernels(variant);
  if (kernels == nullptr || layout < 0 || layout >= kLayoutNumbers || work < 0 || work >= kWorks) return 0;
  if (!HaveSameBits(*kernels, DefaultKernels(), static_cast<Layout>(layout), form != 0)) return 0;
  measured[layout][form != 0][work].store(kernels, std::memory_order_relaxed);
  return 1;
}

}  // extern "C"

// Names of the layouts of w and their numbers: "matrix=0 table=1 ...".
extern "C" __attribute__((visibility("default"))) const char* rooflax_layouts() {
  static const std::string names = [] {
    std::string all;
    for (const auto& [name, layout] : rooflax::kLayouts) {
      all += std::string(name) + "=" + std::to_string(static_cast<int64_t>(layout)) + " ";
    }
    for (const auto& [name, code] : rooflax::kBlockTypes) {
      all += std::string(name) + "=" + std::to_string(rooflax::kCodesFrom + static_cast<int64_t>(code)) + " ";
    }
    return all;
  }();
  return names.c_str();
}
