// The AVX-512 instructions that the kernels use, one lane after the other, so that their AVX-512 code
// is tested where the processor has only AVX2: included before csrc/kernels_avx512*.cc by
// tools/sanitize.sh.
#ifndef ROOFLAX_AVX512_IN_LANES_H_
#define ROOFLAX_AVX512_IN_LANES_H_

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace avx512_in_lanes {

constexpr int kLanes = 16, kBytes = 64;

struct Floats {
  float lane[kLanes];
};
struct Whole {
  uint32_t lane[kLanes];  // wraps around as the instructions do
};
struct Bytes {
  uint8_t lane[kBytes];
};

template <typename To, typename From>
To As(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Lane i of the result is at(i).
template <typename Lanes, typename At>
auto Make(const At& at) {
  Lanes made;
  for (int i = 0; i < static_cast<int>(sizeof(made) / sizeof(made.lane[0])); ++i) made.lane[i] = at(i);
  return made;
}

template <typename At>
__m512 MakeFloats(const At& at) {
  return As<__m512>(Make<Floats>(at));
}
template <typename At>
__m512i MakeWhole(const At& at) {
  return As<__m512i>(Make<Whole>(at));
}
template <typename At>
__m512i MakeBytes(const At& at) {
  return As<__m512i>(Make<Bytes>(at));
}

inline __m512 FromHalf(__m256i x) {
  uint16_t half[kLanes];
  std::memcpy(half, &x, sizeof(half));
  return MakeFloats([&](int i) { return _cvtsh_ss(half[i]); });
}

inline __m256i ToHalf(__m512 x) {
  const Floats from = As<Floats>(x);
  uint16_t half[kLanes];
  for (int i = 0; i < kLanes; ++i) half[i] = _cvtss_sh(from.lane[i], _MM_FROUND_TO_NEAREST_INT);
  __m256i to;
  std::memcpy(&to, half, sizeof(to));
  return to;
}

inline __m512 Add(__m512 x, __m512 y) {
  const Floats a = As<Floats>(x), b = As<Floats>(y);
  return MakeFloats([&](int i) { return a.lane[i] + b.lane[i]; });
}

// Halves onto each other, until one lane is left.
inline float Sum(__m512 x) {
  Floats a = As<Floats>(x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.lane[i] += a.lane[i + width];
  }
  return a.lane[0];
}

inline float Largest(__m512 x) {
  const Floats a = As<Floats>(x);
  return *std::max_element(a.lane, a.lane + kLanes);
}

inline int32_t SumWhole(__m512i x) {
  const Whole a = As<Whole>(x);
  uint32_t sum = 0;
  for (uint32_t lane : a.lane) sum += lane;
  return static_cast<int32_t>(sum);
}

// Quarters of x, then of y, as two bits of `order` each say.
inline __m512 Quarters(__m512 x, __m512 y, int order) {
  const Floats a = As<Floats>(x), b = As<Floats>(y);
  return MakeFloats([&](int i) {
    return (i < kLanes / 2 ? a : b).lane[4 * (order >> (i / 4 * 2) & 3) + i % 4];
  });
}

// In every quarter two lanes of x, then two of y.
inline __m512 InQuarters(__m512 x, __m512 y, int order) {
  const Floats a = As<Floats>(x), b = As<Floats>(y);
  return MakeFloats([&](int i) {
    return (i % 4 < 2 ? a : b).lane[i / 4 * 4 + (order >> (i % 4 * 2) & 3)];
  });
}

inline __m512i Dots(__m512i sums, __m512i u, __m512i s) {
  const Whole sum = As<Whole>(sums);
  const Bytes a = As<Bytes>(u), b = As<Bytes>(s);
  return MakeWhole([&](int i) {
    uint32_t total = sum.lane[i];
    for (int j = 4 * i; j < 4 * i + 4; ++j) {
      total += static_cast<uint32_t>(a.lane[j] * static_cast<int8_t>(b.lane[j]));
    }
    return total;
  });
}

inline uint32_t Common(__m512i x, __m512i y) {
  const Whole a = As<Whole>(x), b = As<Whole>(y);
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>((a.lane[i] & b.lane[i]) != 0) << i;
  return mask;
}

inline __m512i FourTimes(__m128i x) {
  uint8_t quarter[16];
  std::memcpy(quarter, &x, sizeof(quarter));
  return MakeBytes([&](int i) { return quarter[i % 16]; });
}

inline __m512i LookUp(__m512i table, __m512i index) {
  const Bytes a = As<Bytes>(table), b = As<Bytes>(index);
  return MakeBytes([&](int i) -> uint8_t {
    return b.lane[i] & 0x80 ? 0 : a.lane[i / 16 * 16 + b.lane[i] % 16];
  });
}

inline __m512 Take(__m512i index, __m512 table) {
  const Whole a = As<Whole>(index);
  const Floats b = As<Floats>(table);
  return MakeFloats([&](int i) { return b.lane[a.lane[i] % kLanes]; });
}

}  // namespace avx512_in_lanes

#undef _mm512_cvtps_ph
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_ps
#define _mm512_add_ps avx512_in_lanes::Add
#define _mm512_broadcast_i32x4 avx512_in_lanes::FourTimes
#define _mm512_cvtph_ps avx512_in_lanes::FromHalf
#define _mm512_cvtps_ph(x, rounding) avx512_in_lanes::ToHalf(x)
#define _mm512_dpbusd_epi32 avx512_in_lanes::Dots
#define _mm512_permutexvar_ps avx512_in_lanes::Take
#define _mm512_reduce_add_epi32 avx512_in_lanes::SumWhole
#define _mm512_reduce_add_ps avx512_in_lanes::Sum
#define _mm512_reduce_max_ps avx512_in_lanes::Largest
#define _mm512_shuffle_epi8 avx512_in_lanes::LookUp
#define _mm512_shuffle_f32x4 avx512_in_lanes::Quarters
#define _mm512_shuffle_ps avx512_in_lanes::InQuarters
#define _mm512_test_epi32_mask avx512_in_lanes::Common

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VNNI__ 1

#endif  // ROOFLAX_AVX512_IN_LANES_H_
