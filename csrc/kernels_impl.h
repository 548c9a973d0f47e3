// The kernels' code, compiled once per instruction set: the including file names ROOFLAX_ISA.
//
// Vectors of sixteen floats are GCC's; a narrower machine gets them in pieces. Only the int8 product
// differs between instruction sets, because its instruction does.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rooflax {
namespace ROOFLAX_ISA {
namespace {

constexpr int64_t kLanes = 16;
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));

// Memory of any alignment.
template <typename V>
inline V Load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename V>
inline void Store(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

inline float Widen(float x) { return x; }
inline float Widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

inline F16 LoadWide(const float* from) { return Load<F16>(from); }
inline F16 LoadWide(const uint16_t* from) {
  const U16 wide = __builtin_convertvector(Load<H16>(from), U16) << 16;
  return reinterpret_cast<F16>(wide);
}

inline F16 Broadcast(float x) { return F16{} + x; }

// Always in this order.
inline float Sum(F16 x) {
  float lane[kLanes];
  Store(lane, x);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}

// ---- Products with a matrix as it is, [inner, outer] ----

constexpr int64_t kAhead = 8;  // rows of w that are read at once
constexpr int64_t kFewRows = 8;
#if defined(__AVX512F__)
constexpr int64_t kTile = 12;
#else
constexpr int64_t kTile = 4;
#endif

// Few rows: w streams past once, the sums of a stretch of columns stay in the first cache.
template <int64_t M, typename W>
void MatmulFew(const MatmulArgs& a, int64_t row) {
  constexpr int64_t kStretch = 4096 / (M <= 1 ? 2 : M) / kLanes * kLanes;
  const auto* w = static_cast<const W*>(a.w);
  const float* x = a.x + row * a.inner;
  alignas(64) float sums[M][kStretch];
  for (int64_t begin = a.begin; begin < a.end; begin += kStretch) {
    const int64_t width = std::min(kStretch, a.end - begin);
    const int64_t whole = width / kLanes * kLanes;
    for (auto& sum : sums) std::fill(sum, sum + width, 0.0f);
    for (int64_t k = 0; k < a.inner; k += kAhead) {
      const int64_t depth = std::min(kAhead, a.inner - k);
      const W* from = w + k * a.outer + begin;
      for (int64_t n = 0; n < whole; n += kLanes) {
        if (depth == kAhead) {
          F16 wide[kAhead];
          for (int64_t d = 0; d < kAhead; ++d) {
            const W* line = from + d * a.outer + n;
            if (n * sizeof(W) % 64 == 0) __builtin_prefetch(line + kAhead * a.outer);
            wide[d] = LoadWide(line);
          }
          for (int64_t m = 0; m < M; ++m) {
            F16 sum = Load<F16>(sums[m] + n);
            for (int64_t d = 0; d < kAhead; ++d) sum += x[m * a.inner + k + d] * wide[d];
            Store(sums[m] + n, sum);
          }
        } else {
          for (int64_t d = 0; d < depth; ++d) {
            const F16 wide = LoadWide(from + d * a.outer + n);
            for (int64_t m = 0; m < M; ++m) {
              Store(sums[m] + n, Load<F16>(sums[m] + n) + x[m * a.inner + k + d] * wide);
            }
          }
        }
      }
      for (int64_t n = whole; n < width; ++n) {
        for (int64_t m = 0; m < M; ++m) {
          float sum = sums[m][n];
          for (int64_t d = 0; d < depth; ++d) {
            sum += x[m * a.inner + k + d] * Widen(from[d * a.outer + n]);
          }
          sums[m][n] = sum;
        }
      }
    }
    for (int64_t m = 0; m < M; ++m) {
      float* y = a.y + (row + m) * a.outer + begin;
      for (int64_t n = 0; n < width; ++n) y[n] = sums[m][n] + (a.bias ? a.bias[begin + n] : 0.0f);
    }
  }
}

// One tile of rows times two vectors of columns that were packed as [inner, 32].
template <int64_t M>
void MatmulTile(const float* x, int64_t inner, const float* packed, F16 (&sums)[kTile][2]) {
  for (int64_t m = 0; m < M; ++m) sums[m][0] = sums[m][1] = F16{};
  for (int64_t k = 0; k < inner; ++k) {
    const F16 low = Load<F16>(packed + k * 32), high = Load<F16>(packed + k * 32 + 16);
    for (int64_t m = 0; m < M; ++m) {
      const float value = x[m * inner + k];
      sums[m][0] += value * low;
      sums[m][1] += value * high;
    }
  }
}

// Many rows: 32 columns of w are packed once and meet every tile of rows.
template <typename W>
void MatmulMany(const MatmulArgs& a) {
  const auto* w = static_cast<const W*>(a.w);
  std::vector<float> packed(static_cast<size_t>(a.inner) * 32 + 16);
  for (int64_t n = a.begin; n < a.end; n += 32) {
    const int64_t width = std::min<int64_t>(32, a.end - n);
    for (int64_t k = 0; k < a.inner; ++k) {
      const W* from = w + k * a.outer + n;
      float* to = packed.data() + k * 32;
      if (width == 32) {
        Store(to, LoadWide(from));
        Store(to + 16, LoadWide(from + 16));
      } else {
        for (int64_t i = 0; i < 32; ++i) to[i] = i < width ? Widen(from[i]) : 0.0f;
      }
    }
    alignas(64) float line[32];
    F16 sums[kTile][2];
    for (int64_t row = 0; row < a.rows; row += kTile) {
      const int64_t rows = std::min(kTile, a.rows - row);
      const float* x = a.x + row * a.inner;
      if (rows == kTile) {
        MatmulTile<kTile>(x, a.inner, packed.data(), sums);
      } else {
        for (int64_t m = 0; m < rows; ++m) {
          F16 one[kTile][2];
          MatmulTile<1>(x + m * a.inner, a.inner, packed.data(), one);
          sums[m][0] = one[0][0];
          sums[m][1] = one[0][1];
        }
      }
      for (int64_t m = 0; m < rows; ++m) {
        Store(line, sums[m][0]);
        Store(line + 16, sums[m][1]);
        float* y = a.y + (row + m) * a.outer + n;
        for (int64_t i = 0; i < width; ++i) y[i] = line[i] + (a.bias ? a.bias[n + i] : 0.0f);
      }
    }
  }
}

template <typename W>
void MatmulWidth(const MatmulArgs& a) {
  switch (a.rows) {
    case 1: return MatmulFew<1, W>(a, 0);
    case 2: return MatmulFew<2, W>(a, 0);
    case 3: return MatmulFew<3, W>(a, 0);
    case 4: return MatmulFew<4, W>(a, 0);
    case 5: return MatmulFew<5, W>(a, 0);
    case 6: return MatmulFew<6, W>(a, 0);
    case 7: return MatmulFew<7, W>(a, 0);
    case 8: return MatmulFew<8, W>(a, 0);
    default: return MatmulMany<W>(a);
  }
}

void Matmul(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? MatmulWidth<float>(a) : MatmulWidth<uint16_t>(a);
}

// ---- Products with a table, [outer, inner] ----

template <int64_t M, int64_t R, typename W>
void UnembedTile(const UnembedArgs& a, int64_t row, int64_t first) {
  const W* table = static_cast<const W*>(a.table) + first * a.inner;
  const float* x = a.x + row * a.inner;
  F16 sums[R][M];
  for (auto& line : sums) {
    for (auto& sum : line) sum = F16{};
  }
  int64_t k = 0;
  for (; k + kLanes <= a.inner; k += kLanes) {
    F16 values[M];
    for (int64_t m = 0; m < M; ++m) values[m] = Load<F16>(x + m * a.inner + k);
    for (int64_t r = 0; r < R; ++r) {
      const F16 wide = LoadWide(table + r * a.inner + k);
      for (int64_t m = 0; m < M; ++m) sums[r][m] += values[m] * wide;
    }
  }
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t m = 0; m < M; ++m) {
      float sum = Sum(sums[r][m]);
      for (int64_t t = k; t < a.inner; ++t) {
        sum += x[m * a.inner + t] * Widen(table[r * a.inner + t]);
      }
      a.y[(row + m) * a.outer + first + r] = sum;
    }
  }
}

template <int64_t M, int64_t R, typename W>
void UnembedRows(const UnembedArgs& a, int64_t row) {
  int64_t v = a.begin;
  for (; v + R <= a.end; v += R) UnembedTile<M, R, W>(a, row, v);
  for (; v < a.end; ++v) UnembedTile<M, 1, W>(a, row, v);
}

template <typename W>
void UnembedWidth(const UnembedArgs& a) {
  int64_t row = 0;
  for (; row + 8 <= a.rows; row += 8) UnembedRows<8, 3, W>(a, row);
  switch (a.rows - row) {
    case 1: return UnembedRows<1, 8, W>(a, row);
    case 2: return UnembedRows<2, 8, W>(a, row);
    case 3: return UnembedRows<3, 6, W>(a, row);
    case 4: return UnembedRows<4, 5, W>(a, row);
    case 5: return UnembedRows<5, 4, W>(a, row);
    case 6: return UnembedRows<6, 4, W>(a, row);
    case 7: return UnembedRows<7, 3, W>(a, row);
    default: return;
  }
}

void Unembed(const UnembedArgs& a) {
  a.width == Width::kFloat32 ? UnembedWidth<float>(a) : UnembedWidth<uint16_t>(a);
}

// ---- Activations as int8 ----

// NaN if any value is NaN or infinite, so that a fault stays visible.
inline float LargestOf(const float* x, int64_t count) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::fabs(x[i]));
    finite &= std::fabs(x[i]) <= 3.4028234e38f;
  }
  return finite ? largest : NAN;
}

void QuantizeRow(const QuantizeRowsArgs& a, int64_t row) {
  const float* x = a.x + row * a.inner;
  uint8_t* q = a.q + row * a.stride;
  const float largest = LargestOf(x, a.inner);
  if (std::isnan(largest)) {
    std::fill(q, q + a.stride, uint8_t{128});
    a.scale[row] = largest;
    return;
  }
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  for (int64_t i = 0; i < a.inner; ++i) {
    q[i] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyint(x[i] * inverse)) + 128);
  }
  for (int64_t i = a.inner; i < a.stride; ++i) q[i] = 128;
  a.scale[row] = largest / 127.0f;
}

void QuantizeGroups(const QuantizeGroupsArgs& a, int64_t row) {
  const int64_t groups = a.inner / kGroup;
  for (int64_t g = 0; g < groups; ++g) {
    const float* x = a.x + row * a.inner + g * kGroup;
    int8_t* q = a.q + row * a.inner + g * kGroup;
    const float largest = LargestOf(x, kGroup);
    if (std::isnan(largest)) {
      std::fill(q, q + kGroup, int8_t{0});
      a.scale[row * groups + g] = largest;
      a.sum[row * groups + g] = 0;
      continue;
    }
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < kGroup; ++i) {
      const auto value = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
      q[i] = static_cast<int8_t>(value);
      sum += value;
    }
    a.scale[row * groups + g] = largest / 127.0f;
    a.sum[row * groups + g] = sum;
  }
}

// ---- Products of bytes ----

// sums[lane] += sum over j of u[lane, j] * s[lane, j], for 16 lanes of 4 bytes.
#if defined(__AVX512VNNI__)
inline I16 Dot4(I16 sums, I16 u, I16 s) {
  return reinterpret_cast<I16>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(u),
      reinterpret_cast<__m512i>(s)));
}
#else
inline I16 Dot4(I16 sums, I16 u, I16 s) {
  const U16 bits = reinterpret_cast<U16>(u);
  for (int j = 0; j < 4; ++j) {
    const I16 left = reinterpret_cast<I16>((bits >> (8 * j)) & 0xff);
    const I16 right = (s << (24 - 8 * j)) >> 24;
    sums += left * right;
  }
  return sums;
}
#endif

inline I16 BroadcastBytes(const void* four) {
  int32_t bits;
  std::memcpy(&bits, four, sizeof(bits));
  return I16{} + bits;
}

inline F16 ToFloat(I16 x) { return __builtin_convertvector(x, F16); }

inline void WritePanel(float* y, const float* bias, int64_t count, F16 values) {
  if (bias != nullptr) {
    if (count == kPanel) {
      values += Load<F16>(bias);
    } else {
      float lane[kPanel];
      Store(lane, values);
      for (int64_t i = 0; i < count; ++i) y[i] = lane[i] + bias[i];
      return;
    }
  }
  if (count == kPanel) {
    Store(y, values);
  } else {
    std::memcpy(y, &values, static_cast<size_t>(count) * sizeof(float));
  }
}

template <int64_t M, int64_t P>
void Int8Tile(const Int8Args& a, int64_t row, int64_t panel) {
  const int64_t quads = a.stride / 4;
  const uint8_t* x = a.x + row * a.stride;
  const int8_t* w = a.w + panel * quads * 64;
  I16 sums[P][M];
  for (auto& line : sums) {
    for (auto& sum : line) sum = I16{};
  }
  for (int64_t quad = 0; quad < quads; ++quad) {
    I16 weights[P];
    for (int64_t p = 0; p < P; ++p) {
      const int8_t* from = w + (p * quads + quad) * 64;
      __builtin_prefetch(from + 2048);
      weights[p] = Load<I16>(from);
    }
    for (int64_t m = 0; m < M; ++m) {
      const I16 value = BroadcastBytes(x + m * a.stride + quad * 4);
      for (int64_t p = 0; p < P; ++p) sums[p][m] = Dot4(sums[p][m], value, weights[p]);
    }
  }
  for (int64_t p = 0; p < P; ++p) {
    const int64_t n = (panel + p) * kPanel;
    const int64_t count = std::min(kPanel, a.outer - n);
    const F16 w_scale = Load<F16>(a.w_scale + n);
    const I16 offset = Load<I16>(a.w_sum + n) * 128;
    for (int64_t m = 0; m < M; ++m) {
      const F16 values = ToFloat(sums[p][m] - offset) * (w_scale * a.x_scale[row + m]);
      WritePanel(a.y + (row + m) * a.outer + n, a.bias ? a.bias + n : nullptr, count, values);
    }
  }
}

template <int64_t M, int64_t P>
void Int8Rows(const Int8Args& a, int64_t row, int64_t begin, int64_t end) {
  int64_t panel = begin;
  for (; panel + P <= end; panel += P) Int8Tile<M, P>(a, row, panel);
  for (; panel < end; ++panel) Int8Tile<M, 1>(a, row, panel);
}

void Int8(const Int8Args& a) {
  if (a.rows > 8) {  // panels that stay in the cache meet every tile of rows
    for (int64_t panel = a.begin; panel < a.end; panel += 2) {
      const int64_t end = std::min(panel + 2, a.end);
      int64_t row = 0;
      for (; row + 12 <= a.rows; row += 12) Int8Rows<12, 2>(a, row, panel, end);
      for (; row + 4 <= a.rows; row += 4) Int8Rows<4, 2>(a, row, panel, end);
      for (; row < a.rows; ++row) Int8Rows<1, 2>(a, row, panel, end);
    }
    return;
  }
  switch (a.rows) {
    case 1: return Int8Rows<1, 8>(a, 0, a.begin, a.end);
    case 2: return Int8Rows<2, 8>(a, 0, a.begin, a.end);
    case 3: return Int8Rows<3, 6>(a, 0, a.begin, a.end);
    case 4: return Int8Rows<4, 5>(a, 0, a.begin, a.end);
    case 5: return Int8Rows<5, 4>(a, 0, a.begin, a.end);
    case 6: return Int8Rows<6, 3>(a, 0, a.begin, a.end);
    case 7: return Int8Rows<7, 3>(a, 0, a.begin, a.end);
    case 8: return Int8Rows<8, 2>(a, 0, a.begin, a.end);
    default: return;
  }
}

inline F16 LoadHalf(const uint16_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<F16>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
  F16 out;
  for (int64_t i = 0; i < kLanes; ++i) {
    const uint32_t bits = from[i], sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    float value;
    if (rest < 0x400u) {  // zero or subnormal
      value = static_cast<float>(rest) * 0x1p-24f;
    } else {
      const uint32_t wide = (rest << 13) + (rest >= 0x7c00u ? 0x70000000u : 0x38000000u);
      std::memcpy(&value, &wide, sizeof(value));
    }
    out[i] = sign ? -value : value;
  }
  return out;
#endif
}

template <int64_t M, int64_t P>
void Int4Tile(const Int4Args& a, int64_t row, int64_t panel) {
  const int8_t* x = a.x + row * a.groups * kGroup;
  const U16 low_bits = U16{} + 0x0f0f0f0fu;
  F16 totals[P][M];
  for (auto& line : totals) {
    for (auto& total : line) total = F16{};
  }
  for (int64_t g = 0; g < a.groups; ++g) {
    for (int64_t p = 0; p < P; ++p) {
      const int64_t block = (panel + p) * a.groups + g;
      const uint8_t* from = a.w + block * 256;
      __builtin_prefetch(from + 2048);
      __builtin_prefetch(from + 2112);
      __builtin_prefetch(from + 2176);
      __builtin_prefetch(from + 2240);
      I16 sums[M];
      for (auto& sum : sums) sum = I16{};
      for (int64_t s = 0; s < 4; ++s) {
        const U16 both = Load<U16>(from + s * 64);
        const I16 low = reinterpret_cast<I16>(both & low_bits);
        const I16 high = reinterpret_cast<I16>((both >> 4) & low_bits);
        for (int64_t m = 0; m < M; ++m) {
          const int8_t* values = x + m * a.groups * kGroup + g * kGroup + s * 4;
          sums[m] = Dot4(sums[m], low, BroadcastBytes(values));
          sums[m] = Dot4(sums[m], high, BroadcastBytes(values + 16));
        }
      }
      const F16 scale = LoadHalf(a.w_scale + block * kPanel);
      for (int64_t m = 0; m < M; ++m) {
        const int64_t at = (row + m) * a.groups + g;
        const F16 part = ToFloat(sums[m] - 8 * a.x_sum[at]);
        totals[p][m] += part * (scale * a.x_scale[at]);
      }
    }
  }
  for (int64_t p = 0; p < P; ++p) {
    const int64_t n = (panel + p) * kPanel;
    const int64_t count = std::min(kPanel, a.outer - n);
    for (int64_t m = 0; m < M; ++m) {
      float* y = a.y + (row + m) * a.outer + n;
      WritePanel(y, a.bias ? a.bias + n : nullptr, count, totals[p][m]);
    }
  }
}

template <int64_t M, int64_t P>
void Int4Rows(const Int4Args& a, int64_t row, int64_t begin, int64_t end) {
  int64_t panel = begin;
  for (; panel + P <= end; panel += P) Int4Tile<M, P>(a, row, panel);
  for (; panel < end; ++panel) Int4Tile<M, 1>(a, row, panel);
}

void Int4(const Int4Args& a) {
  if (a.rows > 8) {
    for (int64_t panel = a.begin; panel < a.end; ++panel) {
      int64_t row = 0;
      for (; row + 12 <= a.rows; row += 12) Int4Rows<12, 1>(a, row, panel, panel + 1);
      for (; row + 4 <= a.rows; row += 4) Int4Rows<4, 1>(a, row, panel, panel + 1);
      for (; row < a.rows; ++row) Int4Rows<1, 1>(a, row, panel, panel + 1);
    }
    return;
  }
  switch (a.rows) {
    case 1: return Int4Rows<1, 4>(a, 0, a.begin, a.end);
    case 2: return Int4Rows<2, 4>(a, 0, a.begin, a.end);
    case 3: return Int4Rows<3, 2>(a, 0, a.begin, a.end);
    case 4: return Int4Rows<4, 2>(a, 0, a.begin, a.end);
    case 5: return Int4Rows<5, 1>(a, 0, a.begin, a.end);
    case 6: return Int4Rows<6, 1>(a, 0, a.begin, a.end);
    case 7: return Int4Rows<7, 1>(a, 0, a.begin, a.end);
    case 8: return Int4Rows<8, 1>(a, 0, a.begin, a.end);
    default: return;
  }
}

// ---- Attention ----

// e to the x for x <= 0, to 2 units in the last place; below -87 it is 0.
inline F16 Exp(F16 x) {
  const F16 floor_at = Broadcast(-87.0f);
  const I16 visible = x > floor_at;
  x = reinterpret_cast<F16>((reinterpret_cast<I16>(x) & visible) |
                            (reinterpret_cast<I16>(floor_at) & ~visible));
  const F16 scaled = x * 1.44269504f;
  const I16 whole = __builtin_convertvector(scaled - 0.5f, I16);  // towards zero: rounds to nearest
  const F16 n = ToFloat(whole);
  const F16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  F16 p = Broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const F16 power = reinterpret_cast<F16>((whole + 127) << 23);
  return reinterpret_cast<F16>(reinterpret_cast<I16>(p * power) & visible);
}

template <typename W>
void AttendWidth(const AttendArgs& a) {
  const auto* k = static_cast<const W*>(a.k);
  const auto* v = static_cast<const W*>(a.v);
  const int64_t count = a.last - a.first, whole = a.head_dim / kLanes * kLanes;
  const auto slot = [&](const W* pool, int64_t i) {
    const int64_t at = a.first + i;
    return pool + a.table[at / a.block_size] * a.block_stride + at % a.block_size * a.head_dim;
  };
  float highest = a.sink ? *a.sink : -3.0e38f;
  for (int64_t i = 0; i < count; ++i) {
    const W* key = slot(k, i);
    F16 sum = F16{};
    for (int64_t d = 0; d < whole; d += kLanes) sum += Load<F16>(a.q + d) * LoadWide(key + d);
    float score = Sum(sum);
    for (int64_t d = whole; d < a.head_dim; ++d) score += a.q[d] * Widen(key[d]);
    a.scores[i] = score * a.scale;
    highest = std::max(highest, a.scores[i]);
  }
  float total = 0.0f;
  for (int64_t i = 0; i < count; i += kLanes) {
    float lane[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) lane[j] = i + j < count ? a.scores[i + j] - highest : -100.0f;
    Store(lane, Exp(Load<F16>(lane)));
    for (int64_t j = 0; j < kLanes && i + j < count; ++j) total += a.scores[i + j] = lane[j];
  }
  if (a.sink) {
    float lane[kLanes];
    Store(lane, Exp(Broadcast(*a.sink - highest)));
    total += lane[0];
  }
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  std::fill(a.out, a.out + a.head_dim, 0.0f);
  constexpr int64_t kHeld = 4;  // vectors of the output that stay in registers
  for (int64_t d = 0; d < whole; d += kHeld * kLanes) {
    const int64_t held = std::min(kHeld, (whole - d) / kLanes);
    F16 sums[kHeld] = {};
    for (int64_t i = 0; i < count; ++i) {
      const W* value = slot(v, i) + d;
      const float share = a.scores[i];
      for (int64_t h = 0; h < kHeld; ++h) {
        if (h < held) sums[h] += share * LoadWide(value + h * kLanes);
      }
    }
    for (int64_t h = 0; h < held; ++h) Store(a.out + d + h * kLanes, sums[h] * inverse);
  }
  for (int64_t d = whole; d < a.head_dim; ++d) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += a.scores[i] * Widen(slot(v, i)[d]);
    a.out[d] = sum * inverse;
  }
}

void Attend(const AttendArgs& a) {
  a.width == Width::kFloat32 ? AttendWidth<float>(a) : AttendWidth<uint16_t>(a);
}

// ---- The largest ----

int64_t Argmax(const float* x, int64_t count) {
  const int64_t whole = count / kLanes * kLanes;
  F16 best = Broadcast(-INFINITY);
  I16 strange = I16{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F16 values = Load<F16>(x + i);
    strange |= values != values;
    best = values > best ? values : best;
  }
  float lane[kLanes];
  Store(lane, best);
  float highest = *std::max_element(lane, lane + kLanes);
  bool has_nan = false;
  int32_t flags[kLanes];
  Store(flags, strange);
  for (int32_t flag : flags) has_nan |= flag != 0;
  for (int64_t i = whole; i < count; ++i) {
    has_nan |= std::isnan(x[i]);
    highest = std::max(highest, x[i]);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (has_nan ? std::isnan(x[i]) : x[i] == highest) return i;
  }
  return 0;
}

}  // namespace

const Kernels kKernels = {ROOFLAX_ISA_NAME, Matmul, Unembed, QuantizeRow, QuantizeGroups,
                          Int8, Int4, Attend, Argmax};

}  // namespace ROOFLAX_ISA
}  // namespace rooflax
