// Embedding rows, the largest logits and the sampler's noise as XLA custom calls.

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

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

// The largest of a row, largest first and the first of equals first, in expected time O(columns):
// values above the least of the best so far are gathered until there are twice as many as wanted.
void TopOfRow(const float* x, int64_t columns, int64_t wanted, std::vector<int32_t>& best,
              float* values, int32_t* ids) {
  const Kernels& kernels = ChosenKernels();
  const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  float least = -std::numeric_limits<float>::infinity();
  int64_t count = 0;
  for (int64_t at = 0; at < columns;) {
    const int64_t room = static_cast<int64_t>(best.size()) - count;
    count += kernels.above(x, &at, columns, least, best.data() + count, room);
    if (count > wanted) {
      std::nth_element(best.begin(), best.begin() + wanted - 1, best.begin() + count, before);
      count = wanted;
      least = x[best[wanted - 1]];
    }
  }
  std::sort(best.begin(), best.begin() + count, before);
  for (int64_t i = 0; count < wanted; ++i) {  // the rest is -inf, or not a number
    if (!(x[i] > -std::numeric_limits<float>::infinity())) best[count++] = static_cast<int32_t>(i);
  }
  for (int64_t i = 0; i < wanted; ++i) {
    ids[i] = best[i];
    values[i] = x[ids[i]];
  }
}

ffi::Error Top(F32 x, ffi::Result<F32> values, ffi::Result<ffi::Buffer<ffi::S32>> ids) {
  if (Rank(x) != 2 || Rank(*values) != 2 || Rank(*ids) != 2 || Dim(*values, 0) != Dim(x, 0) ||
      Dim(*ids, 0) != Dim(x, 0) || Dim(*ids, 1) != Dim(*values, 1) || Dim(*values, 1) < 1 ||
      Dim(*values, 1) > Dim(x, 1)) {
    return Refuse("top: shapes");
  }
  const int64_t wanted = Dim(*values, 1);
  std::vector<int32_t> best(static_cast<size_t>(2 * wanted));
  for (int64_t row = 0; row < Dim(x, 0); ++row) {
    TopOfRow(x.typed_data() + row * Dim(x, 1), Dim(x, 1), wanted, best,
             values->typed_data() + row * wanted, ids->typed_data() + row * wanted);
  }
  return ffi::Error::Success();
}

using U32 = ffi::Buffer<ffi::U32>;
using S32 = ffi::Buffer<ffi::S32>;

// Of every row: its key, the first counter it shares, and the second counters of its columns.
ffi::Error RandomBits(U32 seeds, U32 samples, S32 positions, S32 ids, ffi::Result<U32> bits) {
  const int64_t rows = Rank(ids) == 2 ? Dim(ids, 0) : -1;
  for (const size_t count : {seeds.element_count(), samples.element_count(),
                             positions.element_count()}) {
    if (static_cast<int64_t>(count) != rows) return Refuse("random bits: shapes");
  }
  if (bits->element_count() != ids.element_count()) return Refuse("random bits: shapes");
  for (int64_t row = 0; row < rows; ++row) {
    const uint32_t key[2] = {seeds.typed_data()[row], samples.typed_data()[row]};
    const int64_t at = row * Dim(ids, 1);
    ChosenKernels().random_bits(key, static_cast<uint32_t>(positions.typed_data()[row]),
                                ids.typed_data() + at, Dim(ids, 1), bits->typed_data() + at);
  }
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_rows, Rows,
                ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<F32>());
ROOFLAX_HANDLER(rooflax_argmax, Argmax,
                ffi::Ffi::Bind().Arg<F32>().Ret<ffi::Buffer<ffi::S32>>());
ROOFLAX_HANDLER(rooflax_top, Top,
                ffi::Ffi::Bind().Arg<F32>().Ret<F32>().Ret<ffi::Buffer<ffi::S32>>());
ROOFLAX_HANDLER(rooflax_random_bits, RandomBits,
                ffi::Ffi::Bind().Arg<U32>().Arg<U32>().Arg<S32>().Arg<S32>().Ret<U32>());

}  // namespace rooflax
