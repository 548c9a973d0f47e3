// Embedding rows, norms of rows and the largest logits as XLA custom calls.

#include <algorithm>
#include <cstring>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

using S32 = ffi::Buffer<ffi::S32>;

// y[i] = table[index[i]], upcast, for the first `num_rows` (all, if that is empty).
ffi::Error Rows(ffi::AnyBuffer table, S32 index, S32 num_rows, ffi::Result<F32> y) {
  Width width;
  if (Rank(table) != 2 || Rank(index) != 1 || Rank(*y) != 2 || Dim(*y, 0) != Dim(index, 0) ||
      Dim(*y, 1) != Dim(table, 1) || !WidthOf(table.element_type(), width) || !IsPlain(width)) {
    return Reject("rows: shapes or types");
  }
  const int64_t outer = Dim(table, 0), inner = Dim(table, 1);
  int64_t count = 0;
  if (!RealRows(num_rows, Dim(index, 0), count)) return Reject("rows: number of rows");
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = index.typed_data()[i];
    if (row < 0 || row >= outer) return Reject("rows: an index outside the table");
    float* to = y->typed_data() + i * inner;
    if (width == Width::kFloat32) {
      const auto* from = static_cast<const float*>(table.untyped_data()) + row * inner;
      std::copy(from, from + inner, to);
    } else {
      const auto* from = static_cast<const uint16_t*>(table.untyped_data()) + row * inner;
      for (int64_t k = 0; k < inner; ++k) {
        const uint32_t bits = static_cast<uint32_t>(from[k]) << 16;
        std::memcpy(to + k, &bits, sizeof(bits));
      }
    }
  }
  return ffi::Error::Success();
}

// Every row of x normed: RMSNorm, or with a bias LayerNorm.
ffi::Error Norm(ffi::ThreadPool threads, F32 x, F32 weight, F32 bias, ffi::Result<F32> y, float eps) {
  if (Rank(x) < 1 || !SameShape(x, *y) || Rank(weight) != 1 || Rank(bias) != 1) {
    return Reject("norm: shapes");
  }
  const int64_t inner = Dim(x, static_cast<size_t>(Rank(x) - 1));
  const bool centred = Dim(bias, 0) != 0;
  if (Dim(weight, 0) != inner || (centred && Dim(bias, 0) != inner)) return Reject("norm: sizes");
  const auto count = static_cast<int64_t>(x.element_count());
  if (count == 0) return ffi::Error::Success();
  BeforeArgs args{};
  args.kind = centred ? Before::kLayerNorm : Before::kRmsNorm;
  args.weight = weight.typed_data();
  args.bias = OrNull(bias);
  args.eps = eps;
  args.inner = inner;
  constexpr int64_t kPiece = 1 << 13;  // elements that are worth handing over
  const int64_t rows = count / inner, piece = std::max<int64_t>(1, kPiece / inner);
  ParallelFor(
      (rows + piece - 1) / piece, ThreadsFor(threads, count),
      [&](auto task) { threads.Schedule(std::move(task)); },
      [&](int64_t number) {
        const int64_t end = std::min(rows, (number + 1) * piece);
        for (int64_t row = number * piece; row < end; ++row) {
          ChosenKernels().before(args, x.typed_data() + row * inner, y->typed_data() + row * inner);
        }
      });
  return ffi::Error::Success();
}

// Of the first `num_rows`; of the others it is 0.
ffi::Error Argmax(F32 x, S32 num_rows, ffi::Result<S32> y) {
  if (Rank(x) != 2 || Rank(*y) != 1 || Dim(*y, 0) != Dim(x, 0) || Dim(x, 1) < 1) {
    return Reject("argmax: shapes");
  }
  int64_t count = 0;
  if (!RealRows(num_rows, Dim(x, 0), count)) return Reject("argmax: number of rows");
  TheComputed().sampled_rows.fetch_add(count, std::memory_order_relaxed);
  std::fill(y->typed_data() + count, y->typed_data() + Dim(x, 0), 0);
  const Kernels& kernels = ChosenKernels();
  for (int64_t row = 0; row < count; ++row) {
    const int64_t found = kernels.argmax(x.typed_data() + row * Dim(x, 1), Dim(x, 1));
    y->typed_data()[row] = static_cast<int32_t>(found);
  }
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_rows, Rows,
                ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<S32>().Arg<S32>().Ret<F32>());
ROOFLAX_HANDLER(rooflax_norm, Norm,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Ret<F32>()
                    .Attr<float>("eps"));
ROOFLAX_HANDLER(rooflax_argmax, Argmax,
                ffi::Ffi::Bind().Arg<F32>().Arg<S32>().Ret<S32>());

}  // namespace rooflax
