// Rows in float32 as codes in groups of 32 with a scale each, by threads: of ggml's IQ4_NL, and of six bits. Of several
// scales each group takes the one with the least weighted error; ops/weights/iq4.py and int6.py say which, and give
// the same bits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"

// Compiled for several instruction sets, where the loader can choose one and no sanitizer comes before it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ROOFLAX_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ROOFLAX_CLONES
#endif

namespace rooflax {
namespace {

// A number of each of sixteen groups.
typedef float Numbers __attribute__((vector_size(64)));
typedef int32_t Mask __attribute__((vector_size(64)));

constexpr int kGroup = 32, kLanes = 16, kCodes = 16, kTries = 4;
constexpr float kMostScale = 65504.0f;  // of float16
constexpr float kValues[kCodes] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

#define ROOFLAX_SELECT(mask, a, b) (Numbers)(((mask) & (Mask)(a)) | (~(mask) & (Mask)(b)))

// Codes: the value that the largest number of a group gets first, and by how much less of it the next scale is tried;
// the nearest value of numbers divided by their scale, and its code.
struct Iq4 {
  static constexpr float kFirst = kValues[0], kStep = 1.0f / 64.0f;
  static Numbers Nearest(Numbers scaled) {
    Numbers value = Numbers{} + kValues[0];
    for (int code = 1; code < kCodes; ++code) {
      const Mask above = scaled >= (kValues[code] + kValues[code - 1]) * 0.5f;
      value += (Numbers)(above & (Mask)(Numbers{} + (kValues[code] - kValues[code - 1])));
    }
    return value;
  }
  static Mask Code(Numbers scaled) {
    Mask code{};
    for (int n = 1; n < kCodes; ++n) code -= scaled >= (kValues[n] + kValues[n - 1]) * 0.5f;
    return code;
  }
};

struct Int6 {
  static constexpr float kFirst = -32.0f, kStep = 1.0f / 128.0f;
  // The nearest whole number in -32 to 31, halves to even; of NaN the first.
  static Numbers Nearest(Numbers scaled) {
    constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: above it numbers are whole
    scaled = (scaled + kWhole) - kWhole;
    scaled = ROOFLAX_SELECT(scaled >= -32.0f, scaled, Numbers{} - 32.0f);
    return ROOFLAX_SELECT(scaled > 31.0f, Numbers{} + 31.0f, scaled);
  }
  static Mask Code(Numbers scaled) { return __builtin_convertvector(Nearest(scaled) + 32.0f, Mask); }
};

// Groups [begin, end): codes, scales, and the largest magnitude, NaN where a number is not finite.
template <typename Codes>
[[gnu::always_inline]] inline void Encode(const float* rows, int64_t begin, int64_t end, uint8_t* codes, float* scales,
                                          float* largest) {
  const Mask signless = Mask{} + 0x7fffffff;
  float lines[kGroup][kLanes] = {};
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, end - first);
    for (int64_t lane = 0; lane < count; ++lane) {
      for (int64_t i = 0; i < kGroup; ++i) lines[i][lane] = rows[(first + lane) * kGroup + i];
    }
    Numbers x[kGroup], weight[kGroup], most{}, fault{}, size{};
    std::memcpy(x, lines, sizeof(x));
    for (const Numbers& one : x) {
      const Mask larger = (Numbers)((Mask)one & signless) > (Numbers)((Mask)most & signless);
      most = ROOFLAX_SELECT(larger, one, most);
      fault += one * 0.0f;
      size += one * one;
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) size[lane] = std::sqrt(size[lane] / kGroup);
    for (int64_t i = 0; i < kGroup; ++i) weight[i] = (Numbers)((Mask)x[i] & signless) + size;
    Numbers scale{}, best{};
    for (int attempt = -kTries; attempt <= kTries; ++attempt) {
      const float last = Codes::kFirst * (1.0f - static_cast<float>(attempt) * Codes::kStep);
      const Numbers inverse = (Numbers{} + last) / most;
      Numbers top{}, bottom{};
      for (int64_t i = 0; i < kGroup; ++i) {
        const Numbers value = Codes::Nearest(x[i] * inverse), weighted = weight[i] * value;
        top += weighted * x[i];
        bottom += weighted * value;
      }
      const Numbers found = top / bottom, gain = found * top;
      const Mask better = gain > best;
      best = ROOFLAX_SELECT(better, gain, best);
      scale = ROOFLAX_SELECT(better, found, scale);
    }
    Numbers inverse{};
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      scale[lane] = std::clamp(scale[lane], -kMostScale, kMostScale);
      inverse[lane] = std::fabs(scale[lane]) >= 0x1p-126f ? 1.0f / scale[lane] : 0.0f;
    }
    for (int64_t i = 0; i < kGroup; ++i) {
      const Mask code = Codes::Code(x[i] * inverse);
      for (int64_t lane = 0; lane < count; ++lane) codes[(first + lane) * kGroup + i] = static_cast<uint8_t>(code[lane]);
    }
    for (int64_t lane = 0; lane < count; ++lane) {
      scales[first + lane] = scale[lane];
      largest[first + lane] = std::fabs(most[lane]) + fault[lane];
    }
  }
}

using Encoder = void(const float* rows, int64_t begin, int64_t end, uint8_t* codes, float* scales, float* largest);

ROOFLAX_CLONES void EncodeIq4(const float* rows, int64_t begin, int64_t end, uint8_t* codes, float* scales,
                              float* largest) {
  Encode<Iq4>(rows, begin, end, codes, scales, largest);
}
ROOFLAX_CLONES void EncodeInt6(const float* rows, int64_t begin, int64_t end, uint8_t* codes, float* scales,
                               float* largest) {
  Encode<Int6>(rows, begin, end, codes, scales, largest);
}

void ByThreads(Encoder& encode, const float* rows, int64_t groups, uint8_t* codes, float* scales, float* largest,
               int threads) {
  InParts(groups, threads, [&](int64_t begin, int64_t end) { encode(rows, begin, end, codes, scales, largest); });
}

}  // namespace
}  // namespace rooflax

// Groups of 32 numbers, all of whose codes, scales and largest magnitudes are written.
extern "C" __attribute__((visibility("default"))) void rooflax_encode_iq4(
    const float* rows, int64_t groups, uint8_t* codes, float* scales, float* largest, int threads) {
  rooflax::ByThreads(rooflax::EncodeIq4, rows, groups, codes, scales, largest, threads);
}
extern "C" __attribute__((visibility("default"))) void rooflax_encode_int6(
    const float* rows, int64_t groups, uint8_t* codes, float* scales, float* largest, int threads) {
  rooflax::ByThreads(rooflax::EncodeInt6, rows, groups, codes, scales, largest, threads);
}
