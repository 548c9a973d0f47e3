// LoRA adapters in slots beside one matmul, as an XLA custom call:
//
//   y[m] += (before(x[m]) A[s]) B[s], where row m has the adapter of slot s
//
// Rows of one slot run together, so that its A and B are read once; a row without an adapter is not read
// and stays as it is. Sums over inputs are of pieces whose ends depend on their number alone, one piece
// after the other: so threads share a row, and what a row gets depends on nothing beside it.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

using S32 = ffi::Buffer<ffi::S32>;

constexpr int64_t kMostPieces = 4, kLeastPiece = 64;  // of inputs
constexpr int64_t kRowsTogether = 64;  // of a slot, in one item
constexpr int64_t kLeastPanels = 4;  // in one item
constexpr int64_t kItems = 4;  // to each thread, where there is so much

struct Inputs {
  ffi::AnyBuffer x, y;
  F32 norm_weight, norm_bias;
  ffi::AnyBuffer a, b;
  S32 spans, slots, index, num_rows;
};

// Outputs of one tensor that lie together, and their first panel of B.
struct Span {
  int64_t first, outputs, part, panel;
  int64_t Panels() const { return (outputs + kPanel - 1) / kPanel; }
};

struct Adapters {
  bool half_rows, half_weights, half_sums;  // x, A and B, and y are bfloat16
  BeforeArgs before;
  int64_t rows, x_width, inner, outer, num_slots, width, rank, panels;
  const char *a, *b;  // of the member
  std::vector<Span> spans;

  int64_t Piece() const {
    return std::max(kLeastPiece, ((inner + kMostPieces - 1) / kMostPieces + 15) / 16 * 16);
  }
  int64_t WeightBytes() const { return half_weights ? 2 : 4; }
  const char* A(int64_t slot) const { return a + slot * inner * width * WeightBytes(); }
  const char* B(int64_t slot, int64_t panel) const {
    return b + (slot * panels + panel) * rank * kPanel * WeightBytes();
  }
  int64_t Pieces() const { return std::max<int64_t>(1, (inner + Piece() - 1) / Piece()); }
};

bool IsFloat(const ffi::AnyBuffer& buffer, bool& halves) {
  halves = buffer.element_type() == ffi::DataType::BF16;
  return halves || buffer.element_type() == ffi::DataType::F32;
}

// What is wrong with the spans, or null.
const char* SetSpans(const S32& spans, Adapters& p) {
  if (Rank(spans) != 2 || Dim(spans, 1) != 3) return "spans";
  int64_t end = 0, panels = 0;
  for (int64_t i = 0; i < Dim(spans, 0); ++i) {
    const int32_t* each = spans.typed_data() + i * 3;
    const Span span{each[0], each[1], each[2], panels};
    if (span.first < end || span.outputs < 1 || span.first > p.outer - span.outputs) return "a span outside y";
    if (span.part < 0 || (span.part + 1) * p.rank > p.width) return "a span outside A";
    end = span.first + span.outputs;
    panels += span.Panels();
    p.spans.push_back(span);
  }
  return panels == p.panels ? nullptr : "panels of B";
}

// What is wrong with the arguments, or null.
const char* Check(const Inputs& in, const ffi::AnyBuffer& out, Adapters& p) {
  if (!IsFloat(in.x, p.half_rows) || Rank(in.x) != 2) return "x";
  if (!IsFloat(in.y, p.half_sums) || Rank(in.y) != 2 || !SameShape(in.y, out)) return "y";
  if (in.y.element_type() != out.element_type()) return "type of y";
  if (!IsFloat(in.a, p.half_weights) || in.a.element_type() != in.b.element_type()) return "types of A and B";
  p.rows = Dim(in.x, 0);
  p.x_width = Dim(in.x, 1);
  p.inner = p.before.gated ? p.x_width / 2 : p.x_width;
  p.outer = Dim(in.y, 1);
  p.before.inner = p.inner;
  if (Dim(in.y, 0) != p.rows || p.inner * (p.before.gated ? 2 : 1) != p.x_width) return "shape of x";
  const bool stacked = in.index.element_count() == 1;
  if (!stacked && in.index.element_count() != 0) return "index";
  const size_t axis = stacked ? 1 : 0;
  const auto lead = static_cast<int64_t>(axis);
  if (Rank(in.a) != lead + 3 || Rank(in.b) != lead + 4) return "rank of A or B";
  const int64_t stack = stacked ? Dim(in.a, 0) : 1, member = stacked ? in.index.typed_data()[0] : 0;
  if (stacked && Dim(in.b, 0) != stack) return "stack of B";
  if (member < 0 || member >= stack) return "an index outside the stack";
  p.num_slots = Dim(in.a, axis);
  p.width = Dim(in.a, axis + 2);
  p.panels = Dim(in.b, axis + 1);
  p.rank = Dim(in.b, axis + 2);
  if (Dim(in.a, axis + 1) != p.inner || p.width % kPanel != 0) return "shape of A";
  if (Dim(in.b, axis) != p.num_slots || Dim(in.b, axis + 3) != kPanel) return "shape of B";
  if (const char* why = SetSpans(in.spans, p)) return why;
  const bool layer = p.before.kind == Before::kLayerNorm;
  const auto norm = static_cast<int64_t>(in.norm_weight.element_count());
  if (layer || p.before.kind == Before::kRmsNorm) {
    const int64_t norms = p.inner == 0 ? 0 : norm / p.inner;
    if (norms * p.inner != norm || (norms != 1 && norms != stack) || norm == 0) return "norm";
    const int64_t skipped = norms == 1 ? 0 : member * p.inner;
    p.before.weight = in.norm_weight.typed_data() + skipped;
    p.before.bias = layer ? in.norm_bias.typed_data() + skipped : nullptr;
  } else if (norm != 0) {
    return "norm";
  }
  if (static_cast<int64_t>(in.norm_bias.element_count()) != (layer ? norm : 0)) return "norm";
  if (Rank(in.slots) != 1 || Dim(in.slots, 0) != p.rows) return "slots of rows";
  int64_t real = 0;
  if (!RealRows(in.num_rows, p.rows, real)) return "number of rows";
  p.rows = real;
  for (int64_t i = 0; i < real; ++i) {
    const int32_t slot = in.slots.typed_data()[i];
    if (slot < 0 || slot > p.num_slots) return "a slot that is none";
  }
  p.a = static_cast<const char*>(in.a.untyped_data()) + member * p.num_slots * p.inner * p.width * p.WeightBytes();
  p.b = static_cast<const char*>(in.b.untyped_data()) +
        member * p.num_slots * p.panels * p.rank * kPanel * p.WeightBytes();
  return nullptr;
}

// Rows [begin, end) of the order, of one slot from 0 on.
struct Chunk {
  int64_t begin, end, slot;
};

struct Scratch {
  std::vector<int64_t> order;  // rows with an adapter, those of a slot together
  std::vector<Chunk> chunks;
  std::vector<float> wide, sums, few;
  std::vector<const float*> x;
  std::vector<void*> y;
};

void SetOrder(const Inputs& in, const Adapters& p, Scratch& s) {
  const int32_t* slots = in.slots.typed_data();
  s.order.clear();
  s.chunks.clear();
  for (int64_t i = 0; i < p.rows; ++i) {
    if (slots[i] > 0) s.order.push_back(i);
  }
  std::stable_sort(s.order.begin(), s.order.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
  for (int64_t i = 0; i < static_cast<int64_t>(s.order.size()); ++i) {
    const int64_t slot = slots[s.order[i]] - 1;
    if (s.chunks.empty() || s.chunks.back().slot != slot || i - s.chunks.back().begin == kRowsTogether) {
      s.chunks.push_back({i, i, slot});
    }
    s.chunks.back().end = i + 1;
  }
}

// Row i of the order in float32, behind what comes before its matmul.
void Prepare(const Inputs& in, const Adapters& p, int64_t i, Scratch& s) {
  static thread_local std::vector<float> own;
  const bool changed = p.before.kind != Before::kNone;
  const int64_t at = s.order[i] * p.x_width;
  const float* from = static_cast<const float*>(in.x.untyped_data()) + at;
  float* to = s.wide.data() + i * p.inner;
  if (p.half_rows) {
    own.resize(static_cast<size_t>(p.x_width));
    float* wide = changed ? own.data() : to;
    ChosenKernels().widen(static_cast<const uint16_t*>(in.x.untyped_data()) + at, wide, p.x_width);
    from = wide;
  }
  if (changed) ChosenKernels().before(p.before, from, to);
  s.x[i] = changed || p.half_rows ? to : from;
}

void Compute(ffi::ThreadPool& pool, const Inputs& in, const Adapters& p, char* y) {
  static thread_local Scratch scratch;
  Scratch& s = scratch;
  SetOrder(in, p, s);
  const auto rows = static_cast<int64_t>(s.order.size()), chunks = static_cast<int64_t>(s.chunks.size());
  if (rows == 0) return;
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  const int64_t pieces = p.Pieces(), piece = p.Piece(), sums_size = rows * p.width;
  if (p.half_rows || p.before.kind != Before::kNone) s.wide.resize(std::max(s.wide.size(), size(rows * p.inner)));
  s.sums.resize(std::max(s.sums.size(), size(pieces * sums_size)));
  s.few.resize(std::max(s.few.size(), size(sums_size)));
  s.x.resize(size(rows));
  s.y.resize(size(rows));
  for (int64_t i = 0; i < rows; ++i) s.y[i] = y + s.order[i] * p.outer * (p.half_sums ? 2 : 4);

  const int64_t threads = ThreadsFor(pool, rows * (p.inner * p.width + p.panels * p.rank * kPanel));
  const auto parallel = [&](int64_t count, int64_t helpers, const auto& work) {
    ParallelFor(count, helpers, [&](auto task) { pool.Schedule(std::move(task)); }, work);
  };
  const auto prepare = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) Prepare(in, p, i, s);
  };
  const auto shrink = [&](const Chunk& chunk, int64_t begin, int64_t end) {  // of pieces
    for (int64_t i = begin; i < end; ++i) {
      ChosenKernels().shrink({s.x.data() + chunk.begin, p.A(chunk.slot),
                              s.sums.data() + i * sums_size + chunk.begin * p.width, chunk.end - chunk.begin, p.width,
                              i * piece, std::min(p.inner, (i + 1) * piece), p.half_weights});
    }
  };
  const auto add = [&](int64_t begin, int64_t end) {  // of rows
    begin *= p.width;
    end *= p.width;
    std::copy(s.sums.data() + begin, s.sums.data() + end, s.few.data() + begin);
    for (int64_t i = 1; i < pieces; ++i) {
      const float* from = s.sums.data() + i * sums_size;
      for (int64_t n = begin; n < end; ++n) s.few[n] += from[n];
    }
  };
  const auto expand = [&](const Chunk& chunk, int64_t begin, int64_t end) {  // to panels
    for (const Span& span : p.spans) {
      const int64_t first = std::max(begin, span.panel) - span.panel;
      const int64_t last = std::min(end, span.panel + span.Panels()) - span.panel;
      if (first >= last) continue;
      ChosenKernels().expand({s.few.data() + chunk.begin * p.width + span.part * p.rank,
                              p.B(chunk.slot, span.panel), s.y.data() + chunk.begin, chunk.end - chunk.begin, p.width,
                              p.rank, span.first, span.outputs, first, last, p.half_weights, p.half_sums});
    }
  };
  if (chunks >= 2 * threads || threads == 1) {  // a chunk is one item: threads meet once
    return parallel(chunks, threads, [&](int64_t item) {
      const Chunk& chunk = s.chunks[item];
      prepare(chunk.begin, chunk.end);
      shrink(chunk, 0, pieces);
      add(chunk.begin, chunk.end);
      expand(chunk, 0, p.panels);
    });
  }
  const bool heavy = p.before.kind >= Before::kSilu;  // exponentials
  parallel(rows, ThreadsFor(pool, rows * p.inner * (heavy ? 8 : 1)), [&](int64_t i) { prepare(i, i + 1); });
  const auto split = [&](int64_t count, int64_t least) {  // of each chunk's work, into items
    const int64_t wanted = std::max<int64_t>(1, kItems * threads / chunks);
    return std::max(least, (count + wanted - 1) / wanted);
  };
  const int64_t together = split(pieces, 1), turns = (pieces + together - 1) / together;
  parallel(chunks * turns, threads, [&](int64_t item) {
    const int64_t first = item % turns * together;
    shrink(s.chunks[item / turns], first, std::min(pieces, first + together));
  });
  add(0, rows);
  const int64_t panels = split(p.panels, kLeastPanels), ranges = (p.panels + panels - 1) / panels;
  parallel(chunks * ranges, threads, [&](int64_t item) {
    const int64_t begin = item % ranges * panels;
    expand(s.chunks[item / ranges], begin, std::min(p.panels, begin + panels));
  });
}

// The result may be y's memory.
ffi::Error Call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer y, F32 norm_weight, F32 norm_bias,
                ffi::AnyBuffer a, ffi::AnyBuffer b, S32 spans, S32 slots, S32 index, S32 num_rows,
                ffi::Result<ffi::AnyBuffer> out, int64_t before, int64_t gated, float eps, float alpha, float limit) {
  Adapters p{};
  if (!SetBefore(before, gated, eps, alpha, limit, p.before)) return Reject("adapters: what comes before");
  const Inputs in{x, y, norm_weight, norm_bias, a, b, spans, slots, index, num_rows};
  if (const char* why = Check(in, *out, p)) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("rooflax adapters: ") + why);
  }
  auto* to = static_cast<char*>(out->untyped_data());
  if (to != y.untyped_data()) std::memcpy(to, y.untyped_data(), y.size_bytes());
  Compute(pool, in, p, to);
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_adapters, Call,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<F32>()
                    .Arg<F32>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>()
                    .Ret<ffi::AnyBuffer>().Attr<int64_t>("before").Attr<int64_t>("gated").Attr<float>("eps")
                    .Attr<float>("alpha").Attr<float>("limit"));

}  // namespace rooflax
