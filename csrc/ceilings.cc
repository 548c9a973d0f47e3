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
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "tiles.h"

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
  std::vector<Clock::time_point> ends(static_cast<size_t>(num_threads));
  const auto run = [&](int t) {
    work(t);
    ends[static_cast<size_t>(t)] = Clock::now();
  };
  for (int t = 1; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      ready.fetch_add(1);
      while (!go.load(std::memory_order_acquire)) {
      }
      run(t);
    });
  }
  while (ready.load() != num_threads - 1) {
  }
  const auto start = Clock::now();
  go.store(true, std::memory_order_release);
  run(0);
  for (auto& thread : threads) thread.join();
  return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - start).count();
}

// Keeps a value from being optimised away.
template <typename T>
void Keep(const T& value) {
  asm volatile("" : : "r,m"(value) : "memory");
}

// The same of vectors, which stay in registers until here.
template <typename V, size_t kCount>
__attribute__((always_inline)) inline void KeepAll(V (&values)[kCount]) {
#pragma GCC unroll 16
  for (size_t i = 1; i < kCount; ++i) values[0] += values[i];
  Keep(values[0]);
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

constexpr int kAccumulators = 12;  // enough to hide the latency of two multiply-add units

typedef float Floats4 __attribute__((vector_size(16)));

double MultiplyFloat32Generic(size_t iterations) {
  Floats4 sums[kAccumulators] = {};
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (Floats4& sum : sums) sum = sum * 0.999f + 0.001f;
  }
  KeepAll(sums);
  return 2.0 * 4 * kAccumulators * static_cast<double>(iterations);
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

__attribute__((target("avx512f"))) double MultiplyFloat32Avx512(size_t iterations) {
  __m512 sums[kAccumulators];
  for (auto& sum : sums) sum = _mm512_set1_ps(1.0f);
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sums[j] = _mm512_fmadd_ps(sums[j], a, b);
  }
  KeepAll(sums);
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
  KeepAll(sums);
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
  KeepAll(sums);
  return 2.0 * 32 * kAccumulators * static_cast<double>(iterations);
}

// Products of bytes. Where codes share a scale in groups, the sum of 32 products becomes a float and
// is scaled before it is added: eight steps of 4 products per lane, then a conversion and a
// multiply-add. Unpacking codes is not counted, as many rows share it.
constexpr int kSteps = 8;

// From here on the compiler does not know the value: what is computed with it is computed each time.
template <typename V>
__attribute__((always_inline)) inline V& Unknown(V& value) {
  asm volatile("" : "+x"(value));
  return value;
}

__attribute__((target("avx512f,avx512vnni"))) double MultiplyInt8Avx512(size_t iterations) {
  __m512i sums[kAccumulators];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  const __m512i a = _mm512_set1_epi8(3);
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sums[j] = _mm512_dpbusd_epi32(sums[j], a, a);
  }
  KeepAll(sums);
  return 2.0 * 64 * kAccumulators * static_cast<double>(iterations);
}

__attribute__((target("avx512f,avx512vnni"))) double MultiplyGroupsAvx512(size_t iterations) {
  __m512 totals[kAccumulators];
  for (auto& total : totals) total = _mm512_setzero_ps();
  const __m512i start = _mm512_setzero_si512();
  __m512i a = _mm512_set1_epi8(3);
  const __m512 scale = _mm512_set1_ps(0.001f);
  for (size_t i = 0; i < iterations; ++i) {
    __m512i sums[kAccumulators];
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sums[j] = start;
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
      for (int j = 0; j < kAccumulators; ++j) sums[j] = _mm512_dpbusd_epi32(sums[j], a, Unknown(a));
    }
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) {
      totals[j] = _mm512_fmadd_ps(__builtin_convertvector((__v16si)sums[j], __m512), scale, totals[j]);
    }
  }
  KeepAll(totals);
  return 2.0 * 64 * kSteps * kAccumulators * static_cast<double>(iterations);
}

// AVX2 adds products of bytes up in 16 bits, two at a time, unsigned by signed. Of 8 bits two fit
// there if they are |w| times x with the sign of w.
constexpr int kFew = 8;  // sums, beside which there are registers for what is multiplied

__attribute__((target("avx2"))) inline __m256i DotSigns(__m256i w, __m256i& size, __m256i ones) {
  const __m256i signs = _mm256_sign_epi8(Unknown(size), w);
  return _mm256_madd_epi16(_mm256_maddubs_epi16(size, signs), ones);
}

__attribute__((target("avx2"))) double MultiplyInt8Avx2(size_t iterations) {
  __m256i sums[kFew];
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  const __m256i w = _mm256_set1_epi8(-3), ones = _mm256_set1_epi16(1);
  __m256i size = _mm256_set1_epi8(3);
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kFew; ++j) sums[j] = _mm256_add_epi32(sums[j], DotSigns(w, size, ones));
  }
  KeepAll(sums);
  return 2.0 * 32 * kFew * static_cast<double>(iterations);
}

// The same of operands that were widened to 16 bits.
__attribute__((target("avx2"))) double MultiplyWidenedAvx2(size_t iterations) {
  __m256i sums[kFew];
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  __m256i a = _mm256_set1_epi16(3);
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kFew; ++j) {
      sums[j] = _mm256_add_epi32(sums[j], _mm256_madd_epi16(a, Unknown(a)));
    }
  }
  KeepAll(sums);
  return 2.0 * 16 * kFew * static_cast<double>(iterations);
}

__attribute__((target("avx2,fma"))) double MultiplyInt8GroupsAvx2(size_t iterations) {
  __m256 totals[kFew];
  for (auto& total : totals) total = _mm256_setzero_ps();
  const __m256i w = _mm256_set1_epi8(-3), ones = _mm256_set1_epi16(1);
  __m256i size = _mm256_set1_epi8(3);
  const __m256 scale = _mm256_set1_ps(0.001f);
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kFew; ++j) {
      __m256i sum = DotSigns(w, size, ones);
#pragma GCC unroll 8
      for (int k = 1; k < kSteps; ++k) sum = _mm256_add_epi32(sum, DotSigns(w, size, ones));
      totals[j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, totals[j]);
    }
  }
  KeepAll(totals);
  return 2.0 * 32 * kSteps * kFew * static_cast<double>(iterations);
}

// Float32 by bfloat16: with instructions for bfloat16 a number is the sum of so many.
double MultiplyTermsAvx512(size_t iterations) { return MultiplyBfloat16Avx512(iterations) / rooflax::kMostTerms; }

#if !defined(ROOFLAX_WITHOUT_TILES)
// Tiles of AMX: four of sums, two of rows and two of weights, 16 rows by 16 columns by 64 bytes.
template <typename Add>
double MultiplyTiles(size_t iterations, int64_t numbers, const Add& add) {
  rooflax::TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.Set(tile, 16, 64);
  const rooflax::ConfiguredTiles configured(shapes);
  alignas(64) static constexpr uint8_t kZeros[1024] = {};
  rooflax::LoadTile<4>(kZeros, 64);
  rooflax::LoadTile<5>(kZeros, 64);
  rooflax::LoadTile<6>(kZeros, 64);
  rooflax::LoadTile<7>(kZeros, 64);
  for (size_t i = 0; i < iterations; ++i) add();
  return 2.0 * 4 * 16 * 16 * static_cast<double>(numbers) * static_cast<double>(iterations);
}

double MultiplyInt8Tiles(size_t iterations) {
  return MultiplyTiles(iterations, 64, [] {
    rooflax::AddSignedBytes<0, 4, 6>();
    rooflax::AddSignedBytes<1, 4, 7>();
    rooflax::AddSignedBytes<2, 5, 6>();
    rooflax::AddSignedBytes<3, 5, 7>();
  });
}

double MultiplyBfloat16Tiles(size_t iterations) {
  return MultiplyTiles(iterations, 32, [] {
    rooflax::AddBfloat16<0, 4, 6>();
    rooflax::AddBfloat16<1, 4, 7>();
    rooflax::AddBfloat16<2, 5, 6>();
    rooflax::AddBfloat16<3, 5, 7>();
  });
}

double MultiplyTermsTiles(size_t iterations) { return MultiplyBfloat16Tiles(iterations) / rooflax::kMostTerms; }

// Groups: the sums of 32 products leave the tiles and are scaled, while the next ones are computed.
template <int kTurn>
inline void SumGroup(int32_t (&sums)[16][16]) {
  rooflax::ZeroTile<kTurn>();
  rooflax::AddSignedBytes<kTurn, 4 + kTurn % 2, 6 + kTurn % 2>();
  rooflax::StoreTile<kTurn>(sums, 64);
}

__attribute__((target("avx512f"))) double MultiplyGroupsTiles(size_t iterations) {
  constexpr int kTurns = 4, kTall = 16;
  rooflax::TileShapes shapes;
  for (int tile = 0; tile < 4; ++tile) shapes.Set(tile, kTall, 64);
  for (int tile = 4; tile < 6; ++tile) shapes.Set(tile, kTall, 32);
  for (int tile = 6; tile < 8; ++tile) shapes.Set(tile, 8, 64);
  const rooflax::ConfiguredTiles configured(shapes);
  alignas(64) static constexpr uint8_t kZeros[1024] = {};
  rooflax::LoadTile<4>(kZeros, 32);
  rooflax::LoadTile<5>(kZeros, 32);
  rooflax::LoadTile<6>(kZeros, 64);
  rooflax::LoadTile<7>(kZeros, 64);
  alignas(64) int32_t sums[2][kTurns][kTall][16] = {};
  __m512 totals[kTall];
  for (auto& total : totals) total = _mm512_setzero_ps();
  const __m512 scale = _mm512_set1_ps(0.001f);
  for (size_t i = 0; i < iterations; ++i) {
    auto& next = sums[i % 2];
    SumGroup<0>(next[0]);
    SumGroup<1>(next[1]);
    SumGroup<2>(next[2]);
    SumGroup<3>(next[3]);
    for (const auto& group : sums[1 - i % 2]) {
#pragma GCC unroll 16
      for (int m = 0; m < kTall; ++m) {
        const auto sum = (__v16si)_mm512_load_si512(group[m]);
        totals[m] = _mm512_fmadd_ps(__builtin_convertvector(sum, __m512), scale, totals[m]);
      }
    }
  }
  for (auto& total : totals) Keep(total);
  return 2.0 * kTurns * kTall * 16 * 32 * static_cast<double>(iterations);
}
#endif

// Codes of four bits as unsigned bytes: kTogether steps add up in 16 bits, 8 of int4 (at most
// 8 * 2 * 15 * 127), 4 of MXFP4 (its doubled values are up to 24).
template <int kTogether>
__attribute__((target("avx2,fma"))) double MultiplyNibblesAvx2(size_t iterations) {
  __m256 totals[kFew];
  for (auto& total : totals) total = _mm256_setzero_ps();
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i a = _mm256_set1_epi8(3);
  const __m256 scale = _mm256_set1_ps(0.001f);
  for (size_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kFew; ++j) {
      __m256i sum;
#pragma GCC unroll 2
      for (int part = 0; part < kSteps / kTogether; ++part) {
        __m256i pairs = _mm256_maddubs_epi16(a, Unknown(a));
#pragma GCC unroll 8
        for (int k = 1; k < kTogether; ++k) {
          pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(a, Unknown(a)));
        }
        const __m256i fours = _mm256_madd_epi16(pairs, ones);
        sum = part == 0 ? fours : _mm256_add_epi32(sum, fours);
      }
      totals[j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, totals[j]);
    }
  }
  KeepAll(totals);
  return 2.0 * 32 * kSteps * kFew * static_cast<double>(iterations);
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

// The ways in which this processor can multiply a dtype or a format exactly; as float32 it can
// multiply them all.
std::vector<MultiplyLoop> MultiplyLoops(const std::string& what) {
#if defined(__x86_64__)
  const bool is_int8 = what == "int8", is_int8_groups = what == "int8-g32";
  const bool is_int4 = what == "int4", is_mxfp4 = what == "mxfp4", is_terms = what == "float32xbfloat16";
  std::vector<MultiplyLoop> found;
#if !defined(ROOFLAX_WITHOUT_TILES)
  if (rooflax::HasTiles()) {
    if (is_int8) found.push_back(MultiplyInt8Tiles);
    if (is_int8_groups || is_int4 || is_mxfp4) found.push_back(MultiplyGroupsTiles);
    if (what == "bfloat16") found.push_back(MultiplyBfloat16Tiles);
    if (is_terms) found.push_back(MultiplyTermsTiles);
  }
#endif
  if (__builtin_cpu_supports("avx512f")) {
    found.push_back(MultiplyFloat32Avx512);
    if (__builtin_cpu_supports("avx512bf16")) {
      if (what == "bfloat16") found.push_back(MultiplyBfloat16Avx512);
      if (is_terms) found.push_back(MultiplyTermsAvx512);
    }
    if (__builtin_cpu_supports("avx512vnni")) {
      if (is_int8) found.push_back(MultiplyInt8Avx512);
      if (is_int8_groups || is_int4 || is_mxfp4) found.push_back(MultiplyGroupsAvx512);
    }
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.push_back(MultiplyFloat32Avx2);
    if (is_int8) found.insert(found.end(), {MultiplyInt8Avx2, MultiplyWidenedAvx2});
    if (is_int8_groups) found.push_back(MultiplyInt8GroupsAvx2);
    if (is_int4) found.push_back(MultiplyNibblesAvx2<8>);
    if (is_mxfp4) found.push_back(MultiplyNibblesAvx2<4>);
  }
  if (!found.empty()) return found;
#else
  (void)what;
#endif
  return {MultiplyFloat32Generic};
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

// Operations per second (a multiply-add is two) in registers, in readings of so many seconds, in the fastest way
// that is exact for `what`: "float32", "float32xbfloat16", "bfloat16", "int8", "int8-g32", "int4" or "mxfp4". Of
// some readings the best, as a thread that has to wait lowers one.
__attribute__((visibility("default"))) double rooflax_multiply_rate(const char* what, int num_threads, double seconds) {
  constexpr int kReadings = 8;
  constexpr size_t kProbe = 1000;
  std::vector<double> done(static_cast<size_t>(num_threads));
  double best = 0;
  for (const MultiplyLoop multiply : MultiplyLoops(what)) {
    multiply(kProbe);
    const double probe = TimeThreads(1, [&](int) { multiply(kProbe); });
    const auto iterations = static_cast<size_t>(seconds / probe * kProbe) + 1;
    for (int reading = 0; reading < kReadings; ++reading) {
      const double took = TimeThreads(
          num_threads, [&](int t) { done[static_cast<size_t>(t)] = multiply(iterations); });
      double all = 0;
      for (double one : done) all += one;
      best = std::max(best, all / took);
    }
  }
  return best;
}

}  // extern "C"
