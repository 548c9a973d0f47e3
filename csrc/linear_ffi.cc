// Linear as XLA custom calls: checks of shapes, splitting of the work, nothing else.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

// Columns per piece of work: pieces for every thread several times over, none too narrow to stream.
int64_t PieceSize(int64_t columns, int64_t threads, int64_t unit, int64_t least) {
  const int64_t wanted = columns / (threads * 4);
  return std::max(least, (wanted + unit - 1) / unit * unit);
}

// Runs work(begin, end) over [0, count) in pieces.
template <typename Work>
void InPieces(ffi::ThreadPool& pool, int64_t threads, int64_t count, int64_t piece,
              const Work& work) {
  const int64_t pieces = (count + piece - 1) / piece;
  ParallelFor(
      pieces, threads, [&](auto task) { pool.Schedule(std::move(task)); },
      [&](int64_t i) { work(i * piece, std::min(count, (i + 1) * piece)); });
}

ffi::Error Matmul(ffi::ThreadPool pool, F32 x, ffi::AnyBuffer w, F32 bias, ffi::Result<F32> y) {
  if (Rank(x) != 2 || Rank(w) != 2 || Dim(x, 1) != Dim(w, 0)) return Refuse("matmul: shapes");
  MatmulArgs args;
  if (!WidthOf(w.element_type(), args.width)) return Refuse("matmul: type of w");
  args.x = x.typed_data();
  args.w = w.untyped_data();
  args.bias = OrNull(bias);
  args.y = y->typed_data();
  args.rows = Dim(x, 0);
  args.inner = Dim(x, 1);
  args.outer = Dim(w, 1);
  if (args.bias && Dim(bias, 0) != args.outer) return Refuse("matmul: bias");
  const int64_t threads = ThreadsFor(pool, args.rows * args.inner * args.outer);
  const Kernels& kernels = ChosenKernels();
  InPieces(pool, threads, args.outer, PieceSize(args.outer, threads, 32, 64),
           [&](int64_t begin, int64_t end) {
             MatmulArgs mine = args;
             mine.begin = begin;
             mine.end = end;
             kernels.matmul(mine);
           });
  return ffi::Error::Success();
}

ffi::Error Unembed(ffi::ThreadPool pool, F32 x, ffi::AnyBuffer table, ffi::Result<F32> y) {
  if (Rank(x) != 2 || Rank(table) != 2 || Dim(x, 1) != Dim(table, 1)) {
    return Refuse("unembed: shapes");
  }
  UnembedArgs args;
  if (!WidthOf(table.element_type(), args.width)) return Refuse("unembed: type of table");
  args.x = x.typed_data();
  args.table = table.untyped_data();
  args.y = y->typed_data();
  args.rows = Dim(x, 0);
  args.inner = Dim(x, 1);
  args.outer = Dim(table, 0);
  const int64_t threads = ThreadsFor(pool, args.rows * args.inner * args.outer);
  const Kernels& kernels = ChosenKernels();
  InPieces(pool, threads, args.outer, PieceSize(args.outer, threads, 24, 24),
           [&](int64_t begin, int64_t end) {
             UnembedArgs mine = args;
             mine.begin = begin;
             mine.end = end;
             kernels.unembed(mine);
           });
  return ffi::Error::Success();
}

// y[i] = table[index[i]], widened; an index outside the table takes its nearest row.
ffi::Error Rows(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> index, ffi::Result<F32> y) {
  Width width;
  if (Rank(table) != 2 || Rank(index) != 1 || !WidthOf(table.element_type(), width)) {
    return Refuse("rows: shapes or types");
  }
  const int64_t outer = Dim(table, 0), inner = Dim(table, 1);
  for (int64_t i = 0; i < Dim(index, 0); ++i) {
    const int64_t row = std::clamp<int64_t>(index.typed_data()[i], 0, outer - 1);
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

ffi::Error Argmax(F32 x, ffi::Result<ffi::Buffer<ffi::S32>> y) {
  if (Rank(x) != 2) return Refuse("argmax: shapes");
  const Kernels& kernels = ChosenKernels();
  for (int64_t row = 0; row < Dim(x, 0); ++row) {
    const int64_t found = kernels.argmax(x.typed_data() + row * Dim(x, 1), Dim(x, 1));
    y->typed_data()[row] = static_cast<int32_t>(found);
  }
  return ffi::Error::Success();
}

// Runs quantize(row) for every row; many rows are shared among the threads.
template <typename Quantize>
void EachRow(ffi::ThreadPool& pool, int64_t threads, int64_t rows, const Quantize& quantize) {
  InPieces(pool, rows < 8 ? 1 : threads, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) quantize(row);
  });
}

ffi::Error Int8(ffi::ThreadPool pool, F32 x, ffi::Buffer<ffi::S8> w, F32 w_scale,
                ffi::Buffer<ffi::S32> w_sum, F32 bias, ffi::Result<F32> y) {
  if (Rank(x) != 2 || Rank(w) != 4 || Dim(w, 2) != kPanel || Dim(w, 3) != 4) {
    return Refuse("int8: shapes");
  }
  const int64_t rows = Dim(x, 0), inner = Dim(x, 1), panels = Dim(w, 0), stride = Dim(w, 1) * 4;
  const int64_t outer = Dim(*y, 1);
  if (inner > stride || stride - inner >= 4 || (outer + kPanel - 1) / kPanel != panels ||
      Dim(w_scale, 0) != panels * kPanel || Dim(w_sum, 0) != panels * kPanel ||
      (bias.element_count() != 0 && Dim(bias, 0) != outer)) {
    return Refuse("int8: shapes");
  }
  static thread_local std::vector<uint8_t> values;
  static thread_local std::vector<float> scales;
  values.resize(static_cast<size_t>(rows * stride));
  scales.resize(static_cast<size_t>(rows));
  const int64_t threads = ThreadsFor(pool, rows * inner * outer);
  const Kernels& kernels = ChosenKernels();
  const QuantizeRowsArgs quantize{x.typed_data(), values.data(), scales.data(), inner, stride};
  EachRow(pool, threads, rows, [&](int64_t row) { kernels.quantize_row(quantize, row); });
  const Int8Args args{values.data(), scales.data(), w.typed_data(), w_scale.typed_data(),
                      w_sum.typed_data(), OrNull(bias), y->typed_data(), rows, stride, outer,
                      0, 0};
  InPieces(pool, threads, panels, PieceSize(panels, threads, 8, 8),
           [&](int64_t begin, int64_t end) {
             Int8Args mine = args;
             mine.begin = begin;
             mine.end = end;
             kernels.int8(mine);
           });
  return ffi::Error::Success();
}

ffi::Error Int4(ffi::ThreadPool pool, F32 x, ffi::Buffer<ffi::U8> w, ffi::Buffer<ffi::F16> w_scale,
                F32 bias, ffi::Result<F32> y) {
  if (Rank(x) != 2 || Rank(w) != 5 || Rank(w_scale) != 3) return Refuse("int4: shapes");
  const int64_t rows = Dim(x, 0), inner = Dim(x, 1), panels = Dim(w, 0), groups = Dim(w, 1);
  const int64_t outer = Dim(*y, 1);
  if (Dim(w, 2) != 4 || Dim(w, 3) != kPanel || Dim(w, 4) != 4 || groups * kGroup != inner ||
      (outer + kPanel - 1) / kPanel != panels || Dim(w_scale, 0) != panels ||
      Dim(w_scale, 1) != groups || Dim(w_scale, 2) != kPanel ||
      (bias.element_count() != 0 && Dim(bias, 0) != outer)) {
    return Refuse("int4: shapes");
  }
  static thread_local std::vector<int8_t> values;
  static thread_local std::vector<float> scales;
  static thread_local std::vector<int32_t> sums;
  values.resize(static_cast<size_t>(rows * inner));
  scales.resize(static_cast<size_t>(rows * groups));
  sums.resize(static_cast<size_t>(rows * groups));
  const int64_t threads = ThreadsFor(pool, rows * inner * outer);
  const Kernels& kernels = ChosenKernels();
  const QuantizeGroupsArgs quantize{x.typed_data(), values.data(), scales.data(), sums.data(),
                                    inner};
  EachRow(pool, threads, rows, [&](int64_t row) { kernels.quantize_groups(quantize, row); });
  const Int4Args args{values.data(), scales.data(), sums.data(), w.typed_data(),
                      reinterpret_cast<const uint16_t*>(w_scale.typed_data()), OrNull(bias),
                      y->typed_data(), rows, groups, outer, 0, 0};
  InPieces(pool, threads, panels, PieceSize(panels, threads, 4, 4),
           [&](int64_t begin, int64_t end) {
             Int4Args mine = args;
             mine.begin = begin;
             mine.end = end;
             kernels.int4(mine);
           });
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_matmul, Matmul,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<ffi::AnyBuffer>()
                    .Arg<F32>().Ret<F32>());
ROOFLAX_HANDLER(rooflax_unembed, Unembed,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<ffi::AnyBuffer>()
                    .Ret<F32>());
ROOFLAX_HANDLER(rooflax_rows, Rows,
                ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<F32>());
ROOFLAX_HANDLER(rooflax_argmax, Argmax,
                ffi::Ffi::Bind().Arg<F32>().Ret<ffi::Buffer<ffi::S32>>());
ROOFLAX_HANDLER(rooflax_int8, Int8,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<ffi::Buffer<ffi::S8>>()
                    .Arg<F32>().Arg<ffi::Buffer<ffi::S32>>().Arg<F32>().Ret<F32>());
ROOFLAX_HANDLER(rooflax_int4, Int4,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<ffi::Buffer<ffi::U8>>()
                    .Arg<ffi::Buffer<ffi::F16>>().Arg<F32>().Ret<F32>());

}  // namespace rooflax
