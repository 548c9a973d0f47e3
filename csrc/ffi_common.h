// What the custom calls share.
#ifndef ROOFLAX_FFI_COMMON_H_
#define ROOFLAX_FFI_COMMON_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

// Exports a handler under a C name.
#define ROOFLAX_HANDLER(name, function, binding)                   \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { \
    static auto* handler = (binding).To(function).release();       \
    return handler->Call(frame);                                   \
  }                                                                \
  static_assert(true, "")

namespace rooflax {

namespace ffi = xla::ffi;

using F32 = ffi::Buffer<ffi::F32>;

// Operations below which a second thread costs more than it brings.
constexpr int64_t kWorthAThread = 1 << 16;

template <typename Buffer>
int64_t Rank(const Buffer& buffer) {
  return static_cast<int64_t>(buffer.dimensions().size());
}

template <typename Buffer>
int64_t Dim(const Buffer& buffer, size_t axis) {
  return buffer.dimensions()[axis];
}

template <typename A, typename B>
bool SameShape(const A& a, const B& b) {
  bool same = Rank(a) == Rank(b);
  for (int64_t axis = 0; same && axis < Rank(a); ++axis) same = Dim(a, axis) == Dim(b, axis);
  return same;
}

// An absent argument is an array without elements.
template <typename Buffer>
auto OrNull(const Buffer& buffer) -> decltype(buffer.typed_data()) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

inline ffi::Error Reject(const char* what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("rooflax ") + what);
}

// Of padding in a list of slots; other slots outside the pool are errors. As NO_SLOT in nn/batch.py: more
// than any pool has, also behind the first block of a layer among stacked ones.
constexpr int64_t kNoSlot = int64_t{1} << 30;

// How many leading rows of `most` are real: `count` has one element, or none where all of them are.
// False if that is no number of rows.
inline bool RealRows(const ffi::Buffer<ffi::S32>& count, int64_t most, int64_t& rows) {
  rows = most;
  if (count.element_count() == 0) return true;
  if (count.element_count() != 1) return false;
  rows = count.typed_data()[0];
  return rows >= 0 && rows <= most;
}

// What comes before a matmul, from a call's attributes. False if it is nothing known, or gates where it cannot.
inline bool SetBefore(int64_t kind, int64_t gated, float eps, float alpha, float limit, BeforeArgs& before) {
  if (kind < 0 || kind > static_cast<int64_t>(Before::kClampedSwiglu)) return false;
  before.kind = static_cast<Before>(kind);
  before.gated = gated != 0;
  before.eps = eps;
  before.alpha = alpha;
  before.limit = limit;
  const bool may_gate = before.kind >= Before::kSilu, must_gate = before.kind == Before::kClampedSwiglu;
  return before.gated ? may_gate : !must_gate;
}

// What the kernels computed since the process began, for tests that count.
struct Computed {
  std::atomic<int64_t> matmul_rows{0}, attention_queries{0}, cache_tokens{0}, sampled_rows{0};
};
Computed& TheComputed();

inline bool IsBytes(Width width) { return width == Width::kInt8 || width == Width::kFp8; }

// Widths of weights that are not packed.
inline bool IsPlain(Width width) { return width == Width::kFloat32 || width == Width::kBfloat16; }

inline bool WidthOf(ffi::DataType type, Width& width) {
  if (type == ffi::DataType::F32) {
    width = Width::kFloat32;
  } else if (type == ffi::DataType::BF16) {
    width = Width::kBfloat16;
  } else if (type == ffi::DataType::F16) {
    width = Width::kFloat16;
  } else if (type == ffi::DataType::S8) {
    width = Width::kInt8;
  } else if (type == ffi::DataType::F8E4M3FN) {
    width = Width::kFp8;
  } else {
    return false;
  }
  return true;
}

template <typename Pool>
int64_t ThreadsFor(const Pool& pool, int64_t operations) {
  const int64_t threads = pool.num_threads();  // 0 where there is no pool
  return operations < kWorthAThread || threads < 1 ? 1 : threads;
}

}  // namespace rooflax

#endif  // ROOFLAX_FFI_COMMON_H_
