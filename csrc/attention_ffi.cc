// Attention over the paged cache as an XLA custom call.

#include <algorithm>
#include <vector>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

// q, out: [B, T, N, H]; pools: [blocks, K, block_size, H]; tables: [B, nb]; first_positions: [B];
// positions: [B, T]; context_lens: [B]; sinks: [N] or []. window 0 is all.
ffi::Error Attention(ffi::ThreadPool pool, F32 q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> first_positions,
                     ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> context_lens, F32 sinks,
                     ffi::Result<F32> out, float scale, int64_t window) {
  if (Rank(q) != 4 || Rank(k) != 4 || Rank(tables) != 2 || Rank(positions) != 2 ||
      Rank(first_positions) != 1 || Rank(context_lens) != 1 || !SameShape(k, v) ||
      !SameShape(q, *out)) {
    return Refuse("attention: shapes");
  }
  const int64_t rows = Dim(q, 0), seq = Dim(q, 1), heads = Dim(q, 2), head_dim = Dim(q, 3);
  const int64_t kv_heads = Dim(k, 1), block_size = Dim(k, 2), num_blocks = Dim(tables, 1);
  Width width;
  if (Dim(k, 3) != head_dim || heads % kv_heads != 0 || !WidthOf(k.element_type(), width) ||
      v.element_type() != k.element_type() || Dim(tables, 0) != rows ||
      Dim(positions, 0) != rows || Dim(positions, 1) != seq || Dim(first_positions, 0) != rows ||
      Dim(context_lens, 0) != rows || (sinks.element_count() != 0 && Dim(sinks, 0) != heads)) {
    return Refuse("attention: shapes or types");
  }
  const int64_t item = width == Width::kFloat32 ? 4 : 2;
  const float* sink = OrNull(sinks);
  const int64_t slots = num_blocks * block_size;
  const Kernels& kernels = ChosenKernels();
  const auto attend = [&](int64_t index) {
    static thread_local std::vector<float> scores;
    scores.resize(static_cast<size_t>(slots));
    const int64_t head = index % heads, row = index / heads / seq;
    const int64_t position = positions.typed_data()[index / heads];
    const int64_t begin = first_positions.typed_data()[row];
    const int64_t length = context_lens.typed_data()[row];
    const int64_t past = std::min({position + 1, length, begin + slots});
    const int64_t oldest = window > 0 ? std::max(begin, position + 1 - window) : begin;
    const int64_t at = head / (heads / kv_heads) * block_size * head_dim * item;
    AttendArgs args;
    args.q = q.typed_data() + index * head_dim;
    args.k = static_cast<const char*>(k.untyped_data()) + at;
    args.v = static_cast<const char*>(v.untyped_data()) + at;
    args.table = tables.typed_data() + row * num_blocks;
    args.scores = scores.data();
    args.out = out->typed_data() + index * head_dim;
    args.block_stride = kv_heads * block_size * head_dim;
    args.block_size = block_size;
    args.head_dim = head_dim;
    args.first = oldest - begin;
    args.last = std::max(oldest, past) - begin;
    args.scale = scale;
    args.sink = sink == nullptr ? nullptr : sink + head;
    args.width = width;
    kernels.attend(args);
  };
  const int64_t items = rows * seq * heads;
  int64_t visible = 0;
  for (int64_t row = 0; row < rows; ++row) visible += context_lens.typed_data()[row];
  const int64_t threads = ThreadsFor(pool, visible * seq * heads * head_dim);
  const int64_t piece = std::max<int64_t>(1, items / (threads * 8));
  ParallelFor(
      (items + piece - 1) / piece, threads, [&](auto task) { pool.Schedule(std::move(task)); },
      [&](int64_t i) {
        for (int64_t j = i * piece; j < std::min(items, (i + 1) * piece); ++j) attend(j);
      });
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_attention, Attention,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>()
                    .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()
                    .Arg<ffi::Buffer<ffi::S32>>().Arg<F32>().Ret<F32>()
                    .Attr<float>("scale").Attr<int64_t>("window"));

extern "C" __attribute__((visibility("default"))) int rooflax_ffi_version() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}

}  // namespace rooflax
