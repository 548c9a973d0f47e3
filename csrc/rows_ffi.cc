// Embedding rows and the largest logits as XLA custom calls.

#include <algorithm>
#include <cstring>

#include "ffi_common.h"
#include "kernels.h"

namespace rooflax {
namespace {

// y[i] = table[index[i]], widened; an index outside the table takes its nearest row.
ffi::Error Rows(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> index, ffi::Result<F32> y) {
  Width width;
  if (Rank(table) != 2 || Rank(index) != 1 || !WidthOf(table.element_type(), width) ||
      !IsPlain(width)) {
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

}  // namespace

ROOFLAX_HANDLER(rooflax_rows, Rows,
                ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<F32>());
ROOFLAX_HANDLER(rooflax_argmax, Argmax,
                ffi::Ffi::Bind().Arg<F32>().Ret<ffi::Buffer<ffi::S32>>());

}  // namespace rooflax
