// Attention over the paged cache as an XLA custom call.

#include <algorithm>
#include <vector>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

struct Inputs {
  F32 q;  // [B, T, N, H]
  ffi::AnyBuffer k, v;  // pools [blocks, K, block_size, H]
  F32 k_scale, v_scale;  // of pools of bytes, [blocks, K, block_size]; else empty
  ffi::Buffer<ffi::S32> tables;  // [B, nb]
  ffi::Buffer<ffi::S32> first_positions;  // [B]
  ffi::Buffer<ffi::S32> positions;  // [B, T]
  ffi::Buffer<ffi::S32> context_lens;  // [B]
  F32 sinks;  // [N] or empty
};

struct Sizes {
  int64_t rows, seq, heads, head_dim, kv_heads, block_size, blocks_per_row, group, window;
  Width width;

  int64_t slots() const { return blocks_per_row * block_size; }
  int64_t item() const { return width == Width::kFloat32 ? 4 : IsBytes(width) ? 1 : 2; }
};

bool ScalesFit(const F32& scale, const ffi::AnyBuffer& pool, Width width) {
  if (!IsBytes(width)) return scale.element_count() == 0;
  return Rank(scale) == 3 && Dim(scale, 0) == Dim(pool, 0) && Dim(scale, 1) == Dim(pool, 1) &&
         Dim(scale, 2) == Dim(pool, 2);
}

bool Fits(const Inputs& in, const F32& out, int64_t window, Sizes& s) {
  if (Rank(in.q) != 4 || Rank(in.k) != 4 || Rank(in.tables) != 2 || Rank(in.positions) != 2 ||
      Rank(in.first_positions) != 1 || Rank(in.context_lens) != 1 || !SameShape(in.k, in.v) ||
      !SameShape(in.q, out)) {
    return false;
  }
  s = {Dim(in.q, 0), Dim(in.q, 1), Dim(in.q, 2), Dim(in.q, 3), Dim(in.k, 1), Dim(in.k, 2),
       Dim(in.tables, 1), 0, window, Width::kFloat32};
  if (Dim(in.k, 3) != s.head_dim || s.heads % s.kv_heads != 0 ||
      !WidthOf(in.k.element_type(), s.width) || in.v.element_type() != in.k.element_type()) {
    return false;
  }
  s.group = s.heads / s.kv_heads;
  return Dim(in.tables, 0) == s.rows && Dim(in.positions, 0) == s.rows &&
         Dim(in.positions, 1) == s.seq && Dim(in.first_positions, 0) == s.rows &&
         Dim(in.context_lens, 0) == s.rows && ScalesFit(in.k_scale, in.k, s.width) &&
         ScalesFit(in.v_scale, in.v, s.width) &&
         (in.sinks.element_count() == 0 || Dim(in.sinks, 0) == s.heads);
}

// Queries [begin, end) of one row and K/V head; number i is token i / group, head i % group of it.
void AttendTile(const Inputs& in, const Sizes& s, float scale, float* out, int64_t row, int64_t kv_head,
                int64_t begin, int64_t end) {
  static thread_local std::vector<float> scores;
  const int64_t start = in.first_positions.typed_data()[row];
  const int64_t length = in.context_lens.typed_data()[row];
  const float* sinks = OrNull(in.sinks);
  Query queries[kQueries];
  int64_t low = s.slots(), high = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t token = row * s.seq + i / s.group, head = kv_head * s.group + i % s.group;
    const int64_t position = in.positions.typed_data()[token];
    const int64_t past = std::min({position + 1, length, start + s.slots()});
    const int64_t oldest = s.window > 0 ? std::max(start, position + 1 - s.window) : start;
    const int64_t first = std::min(oldest - start, s.slots());
    const int64_t last = std::max(first, past - start), at = (token * s.heads + head) * s.head_dim;
    queries[i - begin] = {in.q.typed_data() + at, out + at, first, last,
                          sinks == nullptr ? nullptr : sinks + head};
    low = std::min(low, first);
    high = std::max(high, last);
  }
  const int64_t span = std::max<int64_t>(0, high - low);
  scores.resize(static_cast<size_t>(kQueries * span));
  const int64_t at = kv_head * s.block_size;
  AttendArgs args{};
  args.queries = queries;
  args.count = end - begin;
  args.k = static_cast<const char*>(in.k.untyped_data()) + at * s.head_dim * s.item();
  args.v = static_cast<const char*>(in.v.untyped_data()) + at * s.head_dim * s.item();
  if (IsBytes(s.width)) {
    args.k_scale = in.k_scale.typed_data() + at;
    args.v_scale = in.v_scale.typed_data() + at;
  }
  args.table = in.tables.typed_data() + row * s.blocks_per_row;
  args.scores = scores.data();
  args.span = span;
  args.block_stride = s.kv_heads * s.block_size * s.head_dim;
  args.block_size = s.block_size;
  args.head_dim = s.head_dim;
  args.scale = scale;
  args.width = s.width;
  ChosenKernels().attend(args);
}

ffi::Error Attention(ffi::ThreadPool pool, F32 q, ffi::AnyBuffer k, ffi::AnyBuffer v, F32 k_scale,
                     F32 v_scale, ffi::Buffer<ffi::S32> tables,
                     ffi::Buffer<ffi::S32> first_positions, ffi::Buffer<ffi::S32> positions,
                     ffi::Buffer<ffi::S32> context_lens, F32 sinks, ffi::Result<F32> out,
                     float scale, int64_t window) {
  const Inputs in{q, k, v, k_scale, v_scale, tables, first_positions, positions, context_lens,
                  sinks};
  Sizes s;
  if (!Fits(in, *out, window, s)) return Refuse("attention: shapes or types");
  const int64_t queries = s.seq * s.group, tiles = (queries + kQueries - 1) / kQueries;
  const int64_t items = s.rows * s.kv_heads * tiles;
  int64_t visible = 0;
  for (int64_t row = 0; row < s.rows; ++row) visible += context_lens.typed_data()[row];
  const int64_t threads = ThreadsFor(pool, visible * s.seq * s.heads * s.head_dim);
  const int64_t piece = std::max<int64_t>(1, items / (threads * 16));
  ParallelFor(
      (items + piece - 1) / piece, threads, [&](auto task) { pool.Schedule(std::move(task)); },
      [&](int64_t number) {
        for (int64_t i = number * piece; i < std::min(items, (number + 1) * piece); ++i) {
          const int64_t tile = i % tiles, head = i / tiles % s.kv_heads, row = i / tiles / s.kv_heads;
          AttendTile(in, s, scale, out->typed_data(), row, head, tile * kQueries,
                     std::min(queries, (tile + 1) * kQueries));
        }
      });
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_attention, Attention,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>().Arg<F32>().Arg<F32>().Arg<ffi::Buffer<ffi::S32>>()
                    .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()
                    .Arg<ffi::Buffer<ffi::S32>>().Arg<F32>().Ret<F32>()
                    .Attr<float>("scale").Attr<int64_t>("window"));

// Counts changes of what arguments mean; ops/native.py says the one it speaks.
extern "C" __attribute__((visibility("default"))) int rooflax_kernels_version() { return 6; }

extern "C" __attribute__((visibility("default"))) int rooflax_ffi_version() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}

}  // namespace rooflax
