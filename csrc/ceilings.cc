// What this machine can do at most: reading memory, and multiplying in registers.
//
// The loops here do nothing else, so their speed is the ceiling that a kernel is compared with.
// Called through ctypes by rooflax/bench/ceilings.py; knows neither JAX nor models.

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

using ReadLoop = uint64_t (*)(const uint64_t* data, size_t words);

uint64_t ReadGeneric(const uint64_t* data, size_t words) {
  uint64_t sums[8] = {0};
  for (size_t i = 0; i + 8 <= words; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] ^= data[i + j];
  }
  uint64_t all = 0;
  for (uint64_t sum : sums) all ^= sum;
  return all;
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

__attribute__((target("avx512f"))) uint64_t ReadAvx512(const uint64_t* data, size_t words) {
  __m512i sums[8];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  for (size_t i = 0; i + 64 <= words; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(data + i) + 4096, _MM_HINT_T0);
    for (int j = 0; j < 8; ++j) {
      sums[j] = _mm512_xor_si512(sums[j], _mm512_loadu_si512(data + i + 8 * j));
    }
  }
  __m512i all = sums[0];
  for (int j = 1; j < 8; ++j) all = _mm512_xor_si512(all, sums[j]);
  uint64_t lanes[8];
  _mm512_storeu_si512(lanes, all);
  return lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3] ^ lanes[4] ^ lanes[5] ^ lanes[6] ^ lanes[7];
}

__attribute__((target("avx2"))) uint64_t ReadAvx2(const uint64_t* data, size_t words) {
  __m256i sums[8];
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  for (size_t i = 0; i + 32 <= words; i += 32) {
    for (int j = 0; j < 8; ++j) {
      const auto* from = reinterpret_cast<const __m256i*>(data + i + 4 * j);
      sums[j] = _mm256_xor_si256(sums[j], _mm256_loadu_si256(from));
    }
  }
  __m256i all = sums[0];
  for (int j = 1; j < 8; ++j) all = _mm256_xor_si256(all, sums[j]);
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), all);
  return lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3];
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

ReadLoop ChooseRead() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return ReadAvx512;
  if (__builtin_cpu_supports("avx2")) return ReadAvx2;
#endif
  return ReadGeneric;
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

// Bytes per second at which num_threads threads read a buffer, each its own part, `passes` times.
__attribute__((visibility("default"))) double rooflax_read_bandwidth(const void* data, size_t num_bytes, int num_threads, int passes) {
  const ReadLoop read = ChooseRead();
  const auto* words = static_cast<const uint64_t*>(data);
  const size_t part = num_bytes / sizeof(uint64_t) / static_cast<size_t>(num_threads);
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
