// Matmuls with the transpose of a matrix, as training's backward pass has them, as an XLA custom call.

#include <vector>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

// y [rows, outer] = x [rows, inner] times the transpose of w [outer, inner].
ffi::Error Transposed(ffi::ThreadPool pool, F32 x, ffi::AnyBuffer w, ffi::Result<F32> y) {
  MatmulArgs args{};
  if (Rank(x) != 2 || Rank(w) != 2 || Rank(*y) != 2) return Reject("transposed: ranks");
  if (!WidthOf(w.element_type(), args.width) || !IsPlain(args.width)) return Reject("transposed: type of w");
  args.rows = Dim(x, 0);
  args.inner = Dim(x, 1);
  args.end = Dim(*y, 1);
  if (Dim(*y, 0) != args.rows || Dim(w, 0) != args.end || Dim(w, 1) != args.inner) return Reject("transposed: shapes");
  args.x = x.typed_data();
  args.w = w.untyped_data();
  args.out = {y->untyped_data(), nullptr, nullptr, args.end};
  if (args.rows == 0) return ffi::Error::Success();
  const Kernels& kernels = ChosenKernels();
  const int64_t threads = ThreadsFor(pool, args.rows * args.inner * args.end);
  constexpr int64_t kUnit = 32, kLeast = 64;  // columns
  const std::vector<int64_t> ends = FewPieces(args.end, kUnit, kLeast, threads);
  ParallelFor(
      static_cast<int64_t>(ends.size()), threads, [&](auto task) { pool.Schedule(std::move(task)); },
      [&](int64_t piece) {
        MatmulArgs own = args;
        own.begin = piece == 0 ? 0 : ends[piece - 1];
        own.end = ends[piece];
        kernels.matmul_transposed(own);
      });
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_matmul_transposed, Transposed,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<ffi::AnyBuffer>().Ret<F32>());

}  // namespace rooflax
