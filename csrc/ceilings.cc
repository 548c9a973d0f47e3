// What this machine can do at most: reading memory, and multiplying in registers.
//
// The loops here do nothing else, so their speed is the ceiling that a kernel is compared with.
// Called through ctypes by rooflax/bench/ceilings.py; knows neither JAX nor models.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

// Runs work(thread) on every thread at once; seconds from the common start to the last end.
double TimeThreads(int num_threads, const std::function<void(int)>& work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  for (int t = 1; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      ready.fetch_add(1);
      while (!go.load(std::memory_order_acquire)) {
      }
      work(t);
    });
  }
  while (ready.load() != num_threads - 1) {
  }
  const auto start = Clock::now();
  go.store(true, std::memory_order_release);
  work(0);
  for (auto& thread : threads) thread.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Keeps a value from being optimised away.
template <typename T>
void Keep(const T& value) {
  asm volatile("" : : "r,m"(value) : "memory");
}

using ReadLoop = uint64_t (*)(const uint64_t* data, size_t num_words);

// Reads num_words, by vectors V, from kStreams places at once, each its own part of them.
template <typename V, int kStreams>
__attribute__((always_inline)) inline uint64_t Read(const uint64_t* data, size_t num_words) {
  constexpr size_t kTogether = 8, kStep = kTogether * sizeof(V), kAhead = kStreams > 1 ? 512 : 4096;
  const size_t part = num_words * sizeof(uint64_t) / kStreams / kStep * kStep;
  V sums[kTogether] = {};
  for (size_t i = 0; i < part; i += kStep) {
    for (int s = 0; s < kStreams; ++s) {
      const char* from = reinterpret_cast<const char*>(data) + s * part + i;
      for (size_t line = 0; line < (kStreams > 1 ? kStep : 64); line += 64) {
        __builtin_prefetch(from + line + kAhead);
      }
      for (size_t j = 0; j < kTogether; ++j) {
        V value;
        std::memcpy(&value, from + j * sizeof(V), sizeof(V));
        sums[j] ^= value;
      }
    }
  }
  for (size_t j = 1; j < kTogether; ++j) sums[0] ^= sums[j];
  uint64_t lanes[sizeof(V) / sizeof(uint64_t)], all = 0;
  std::memcpy(lanes, &sums[0], sizeof(V));
  for (uint64_t lane : lanes) all ^= lane;
  return all;
}

typedef uint64_t Words2 __attribute__((vector_size(16)));
typedef uint64_t Words4 __attribute__((vector_size(32)));
typedef uint64_t Words8 __attribute__((vector_size(64)));

template <int kStreams>
uint64_t ReadGeneric(const uint64_t* data, size_t num_words) {
  return Read<Words2, kStreams>(data, num_words);
}

// iterations -> operations done; each loop keeps its accumulators in registers.
using MultiplyLoop = double (*)(size_t iterations);

double MultiplyFloat32Generic(size_t iterations) {
  float sums[8] = {0};
  for (size_t i = 0; i < iterations; ++i) {
    for (float& sum : sums) sum = sum * 0.999f + 1.0f;
    Keep(sums);
  }
  return 2.0 * 8 * static_cast<double>(iterations);
}

#if defined(__x86_64__)

template <int kStreams>
__attribute__((target("avx512f"))) uint64_t ReadAvx512(const uint64_t* data, size_t num_words) {
  return Read<Words8, kStreams>(data, num_words);
}

template <int kStreams>
__attribute__((target("avx2"))) uint64_t ReadAvx2(const uint64_t* data, size_t num_words) {
  return Read<Words4, kStreams>(data, num_words);
}

constexpr int kAccumulators = 12;  // enough to hide the latency of two multiply-add units

__attribute__((target("avx512f"))) double MultiplyFloat32Avx512(size_t iterations) {
  __m512 sums[kAccumulators];
  for (auto& sum : sums) sum = _mm512_set1_ps(1.0f);
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sums[j] = _mm512_fmadd_ps(sums[j], a, b);
  }
  for (const auto& sum : sums) Keep(sum);
  return 2.0 * 16 * kAccumulators * static_cast<double>(iterations);
}

__attribute__((target("avx2,fma"))) double MultiplyFloat32Avx2(size_t iterations) {
  __m256 sums[kAccumulators];
  for (auto& sum : sums) sum = _mm256_set1_ps(1.0f);
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sums[j] = _mm256_fmadd_ps(sums[j], a, b);
  }
  for (const auto& sum : sums) Keep(sum);
  return 2.0 * 8 * kAccumulators * static_cast<double>(iterations);
}

__attribute__((target("avx512f,avx512bf16"))) double MultiplyBfloat16Avx512(size_t iterations) {
  __m512 sums[kAccumulators];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], a, a);
  }
  for (const auto& sum : sums) Keep(sum);
  return 2.0 * 32 * kAccumulators * static_cast<double>(iterations);
}

__attribute__((target("avx512f,avx512vnni"))) double MultiplyInt8Avx512(size_t iterations) {
  __m512i sums[kAccumulators];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  const __m512i a = _mm512_set1_epi8(3);
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sums[j] = _mm512_dpbusd_epi32(sums[j], a, a);
  }
  for (const auto& sum : sums) Keep(sum);
  return 2.0 * 64 * kAccumulators * static_cast<double>(iterations);
}

#endif  // __x86_64__

template <int kStreams>
ReadLoop ChooseRead() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return ReadAvx512<kStreams>;
  if (__builtin_cpu_supports("avx2")) return ReadAvx2<kStreams>;
#endif
  return ReadGeneric<kStreams>;
}

// nullptr where this machine has no instruction for the type.
MultiplyLoop ChooseMultiply(const char* dtype) {
  const bool is_float32 = std::strcmp(dtype, "float32") == 0;
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f");
  if (is_float32 && avx512) return MultiplyFloat32Avx512;
  if (is_float32 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return MultiplyFloat32Avx2;
  }
  if (std::strcmp(dtype, "bfloat16") == 0) {
    return __builtin_cpu_supports("avx512bf16") ? MultiplyBfloat16Avx512 : nullptr;
  }
  if (std::strcmp(dtype, "int8") == 0) {
    return __builtin_cpu_supports("avx512vnni") ? MultiplyInt8Avx512 : nullptr;
  }
#endif
  return is_float32 ? MultiplyFloat32Generic : nullptr;
}

}  // namespace

extern "C" {

// Bytes per second at which num_threads threads read a buffer, each its own part from one place or from
// four at once, `passes` times. Which is faster, the processor decides: how it fetches ahead.
__attribute__((visibility("default"))) double rooflax_read_bandwidth(const void* data, size_t num_bytes, int num_threads, int from_four, int passes) {
  const ReadLoop read = from_four ? ChooseRead<4>() : ChooseRead<1>();
  const auto* words = static_cast<const uint64_t*>(data);
  constexpr size_t kWhole = 256;  // words that any loop reads whole
  const size_t most = std::max<size_t>(1, num_bytes / sizeof(uint64_t) / kWhole);
  num_threads = static_cast<int>(std::min(static_cast<size_t>(num_threads), most));
  const size_t part = num_bytes / sizeof(uint64_t) / static_cast<size_t>(num_threads) / kWhole * kWhole;
  const double seconds = TimeThreads(num_threads, [&](int t) {
    for (int pass = 0; pass < passes; ++pass) {
      Keep(read(words + static_cast<size_t>(t) * part, part));
    }
  });
  const auto read_bytes = static_cast<double>(part * sizeof(uint64_t)) * num_threads * passes;
  return read_bytes / seconds;
}

// Operations per second (a multiply-add is two) in registers; 0 where the type has no instruction.
__attribute__((visibility("default"))) double rooflax_multiply_rate(const char* dtype, int num_threads, size_t iterations) {
  const MultiplyLoop multiply = ChooseMultiply(dtype);
  if (multiply == nullptr) return 0.0;
  std::vector<double> done(static_cast<size_t>(num_threads));
  const double seconds = TimeThreads(
      num_threads, [&](int t) { done[static_cast<size_t>(t)] = multiply(iterations); });
  double operations = 0;
  for (double one : done) operations += one;
  return operations / seconds;
}

}  // extern "C"
