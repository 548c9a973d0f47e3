// What the custom calls share.
#ifndef ROOFLAX_FFI_COMMON_H_
#define ROOFLAX_FFI_COMMON_H_

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

inline ffi::Error Refuse(const char* what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("rooflax ") + what);
}

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

inline int64_t ThreadsFor(const ffi::ThreadPool& pool, int64_t operations) {
  const int64_t threads = pool.num_threads();  // 0 where there is no pool
  return operations < kWorthAThread || threads < 1 ? 1 : threads;
}

}  // namespace rooflax

#endif  // ROOFLAX_FFI_COMMON_H_
