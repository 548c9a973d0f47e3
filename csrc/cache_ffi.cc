// The paged cache: writing keys and values into their slots, in place, and the zeros that it begins with, as
// XLA custom calls.

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstring>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

// pool[slot / block_size, head, slot % block_size] = x[token, head], narrowed to the pool's type. The
// result is the pool itself. Slots from kNoSlot on are padding; others outside the pool are errors.
ffi::Error CacheWrite(ffi::ThreadPool threads, ffi::AnyBuffer pool, F32 x,
                      ffi::Buffer<ffi::S32> slots, ffi::Result<ffi::AnyBuffer> out) {
  Width width;
  if (Rank(pool) != 4 || Rank(x) != 3 || Rank(slots) != 1 || Dim(slots, 0) != Dim(x, 0) ||
      Dim(x, 1) != Dim(pool, 1) || Dim(x, 2) != Dim(pool, 3) || !SameShape(pool, *out) ||
      pool.element_type() != out->element_type() || !WidthOf(pool.element_type(), width) ||
      IsBytes(width)) {
    return Reject("cache write: shapes or types");
  }
  const int64_t heads = Dim(pool, 1), block_size = Dim(pool, 2), head_dim = Dim(pool, 3);
  const int64_t num_slots = Dim(pool, 0) * block_size, tokens = Dim(x, 0);
  const int64_t item = width == Width::kFloat32 ? 4 : 2;
  if (num_slots > kNoSlot) return Reject("cache write: a pool with more slots than numbers for them");
  int64_t written = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t slot = slots.typed_data()[token];
    if (slot >= kNoSlot) continue;
    if (slot < 0 || slot >= num_slots) return Reject("cache write: a slot outside the pool");
    ++written;
  }
  TheComputed().cache_tokens.fetch_add(written, std::memory_order_relaxed);
  auto* to = static_cast<char*>(out->untyped_data());
  if (to != pool.untyped_data()) std::memcpy(to, pool.untyped_data(), pool.size_bytes());
  const auto write = [&](int64_t token) {
    const int64_t slot = slots.typed_data()[token];
    if (slot >= kNoSlot) return;
    const float* from = x.typed_data() + token * heads * head_dim;
    const int64_t first = slot / block_size * heads * block_size + slot % block_size;
    for (int64_t head = 0; head < heads; ++head) {
      char* at = to + (first + head * block_size) * head_dim * item;
      ChosenKernels().narrow(from + head * head_dim, at, head_dim, width);
    }
  };
  constexpr int64_t kPiece = 16;
  ParallelFor(
      (tokens + kPiece - 1) / kPiece, ThreadsFor(threads, written * heads * head_dim),
      [&](auto task) { threads.Schedule(std::move(task)); },
      [&](int64_t piece) {
        const int64_t end = std::min(tokens, (piece + 1) * kPiece);
        for (int64_t token = piece * kPiece; token < end; ++token) write(token);
      });
  return ffi::Error::Success();
}

// Zeros that take memory as they are written: pages that the system took back are zero again.
ffi::Error Zeros(ffi::Result<ffi::AnyBuffer> out) {
  auto* data = static_cast<char*>(out->untyped_data());
  const size_t size = out->size_bytes();
#ifdef __linux__
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t before = std::min(size, (page - reinterpret_cast<uintptr_t>(data) % page) % page);
  const size_t whole = (size - before) / page * page;
  if (whole > 0 && madvise(data + before, whole, MADV_DONTNEED) == 0) {
    std::memset(data, 0, before);
    std::memset(data + before + whole, 0, size - before - whole);
    return ffi::Error::Success();
  }
#endif
  std::memset(data, 0, size);
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_zeros, Zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

ROOFLAX_HANDLER(rooflax_cache_write, CacheWrite,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<F32>()
                    .Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>());

}  // namespace rooflax
