// Vectors of sixteen floats: loading, widening, sums in one order, bytes, and the exponential.
// Part of kernels_impl.h.

constexpr int64_t kLanes = 16;
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef int8_t B16 __attribute__((vector_size(16)));

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
inline float Widen(int8_t x) { return static_cast<float>(x); }
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

inline F16 LoadWide(const int8_t* from) {
  return __builtin_convertvector(__builtin_convertvector(Load<B16>(from), I16), F16);
}

// e4m3: the exponent's bias is 7, the smallest step 2^-9; 0x7f is NaN and never stored.
struct E4m3 {
  uint8_t bits;
};

inline F16 FromE4m3(I16 byte) {
  const I16 size = byte & 0x7f;
  const I16 tiny = reinterpret_cast<I16>(__builtin_convertvector(size, F16) * 0x1p-9f);
  const I16 bits = size >= 8 ? (size << 20) + (120 << 23) : tiny;
  return reinterpret_cast<F16>(bits | ((byte & 0x80) << 24));
}

inline F16 LoadWide(const E4m3* from) {
  return FromE4m3(__builtin_convertvector(Load<U8x16>(from), I16));
}

inline float Widen(E4m3 x) { return FromE4m3(I16{} + x.bits)[0]; }

// float16, by its bits.
struct Half {
  uint16_t bits;
};

inline float Widen(Half half) {
  const uint32_t sign = (half.bits & 0x8000u) << 16, rest = half.bits & 0x7fffu;
  float value;
  if (rest < 0x400u) {  // zero or subnormal
    value = static_cast<float>(rest) * 0x1p-24f;
  } else {
    const uint32_t wide = (rest << 13) + (rest >= 0x7c00u ? 0x70000000u : 0x38000000u);
    std::memcpy(&value, &wide, sizeof(value));
  }
  return sign ? -value : value;
}

inline uint16_t HalfBits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (bits >> 13 & 0x1ffu));
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // subnormal: steps of 0.5 are as large
    float size;
    std::memcpy(&size, &bits, sizeof(size));
    size += 0.5f;
    std::memcpy(&bits, &size, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((bits + 0xfffu + (bits >> 13 & 1u) - 0x38000000u) >> 13));
}

inline F16 LoadWide(const Half* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<F16>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  F16 out;
  for (int64_t i = 0; i < kLanes; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m256 wide = _mm256_cvtph_ps(bits);
    std::memcpy(reinterpret_cast<char*>(&out) + i * 4, &wide, sizeof(wide));
  }
  return out;
#else
  F16 out;
  for (int64_t i = 0; i < kLanes; ++i) out[i] = Widen(from[i]);
  return out;
#endif
}

inline H16 ToHalf(F16 x) {
#if defined(__AVX512F__)
  return reinterpret_cast<H16>(
      _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#else
  H16 out;
  for (int64_t i = 0; i < kLanes; ++i) out[i] = HalfBits(x[i]);
  return out;
#endif
}

// To nearest even; NaN stays NaN.
inline H16 ToBfloat16(F16 x) {
  const U16 bits = reinterpret_cast<U16>(x);
  const U16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return __builtin_convertvector((x != x ? bits | 0x400000u : rounded) >> 16, H16);
}

inline F16 Broadcast(float x) { return F16{} + x; }

// Lanes of a where the mask is set, of b elsewhere.
inline F16 Select(I16 mask, F16 a, F16 b) { return mask ? a : b; }

inline F16 Abs(F16 x) {
  return reinterpret_cast<F16>(reinterpret_cast<I16>(x) & 0x7fffffff);
}

// Always in this order: halves on halves.
inline float Sum(F16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
  float lane[kLanes];
  Store(lane, x);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
#endif
}

// Sixteen sums at once, each in the order of Sum: out[i] = Sum(x[i]).
inline F16 SumEach(const F16 x[kLanes]) {
#if defined(__AVX512F__)
  const auto at = [x](int i) { return reinterpret_cast<__m512>(x[i]); };
  __m512 blocks[4];  // blocks[g]: four lanes each of x[g], x[4 + g], x[8 + g], x[12 + g]
  for (int g = 0; g < 4; ++g) {
    const auto halves = [](__m512 a, __m512 b) {
      return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const __m512 first = halves(at(g), at(4 + g)), second = halves(at(8 + g), at(12 + g));
    blocks[g] = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88),
                              _mm512_shuffle_f32x4(first, second, 0xdd));
  }
  const auto pairs = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  };
  const __m512 left = pairs(blocks[0], blocks[1]), right = pairs(blocks[2], blocks[3]);
  return reinterpret_cast<F16>(_mm512_add_ps(_mm512_shuffle_ps(left, right, 0x88),
                                             _mm512_shuffle_ps(left, right, 0xdd)));
#else
  F16 out;
  for (int64_t i = 0; i < kLanes; ++i) out[i] = Sum(x[i]);
  return out;
#endif
}

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

// Read once, not again by every instruction that uses it.
inline void KeepInRegister(U16& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#else
  (void)x;
#endif
}

inline F16 ToFloat(I16 x) { return __builtin_convertvector(x, F16); }

inline B16 ToBytes(I16 x) { return __builtin_convertvector(x, B16); }

#if defined(__AVX512F__)
inline bool AnyLane(I16 x) { return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(x),
                                                           reinterpret_cast<__m512i>(x)) != 0; }
inline float Largest(F16 x) { return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x)); }
inline int32_t SumWhole(I16 x) { return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x)); }
#else
inline bool AnyLane(I16 x) {
  int32_t any = 0;
  for (int64_t i = 0; i < kLanes; ++i) any |= x[i];
  return any != 0;
}
inline float Largest(F16 x) {
  float largest = x[0];
  for (int64_t i = 1; i < kLanes; ++i) largest = std::max(largest, x[i]);
  return largest;
}
inline int32_t SumWhole(I16 x) {
  int32_t sum = 0;
  for (int64_t i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}
#endif

// Bytes of a table of sixteen, by their numbers.
inline I16 LookUp(const uint8_t* table, I16 bytes) {
#if defined(__AVX512BW__)
  const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return reinterpret_cast<I16>(_mm512_shuffle_epi8(values, reinterpret_cast<__m512i>(bytes)));
#else
  uint8_t number[64];
  Store(number, bytes);
  for (auto& n : number) n = table[n];
  return Load<I16>(number);
#endif
}

// Lanes of a table, by the low four bits of each number.
inline F16 TakeLanes(F16 table, U16 numbers) {
#if defined(__AVX512F__)
  return reinterpret_cast<F16>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(numbers),
                                                     reinterpret_cast<__m512>(table)));
#else
  F16 taken;
  for (int64_t i = 0; i < kLanes; ++i) taken[i] = table[numbers[i] & 15];
  return taken;
#endif
}

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
