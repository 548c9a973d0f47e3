// What the kernels do with vectors: widening, sums in one order, products of bytes, the exponential.
// Part of kernels_impl.h.

inline float Widen(float x) { return x; }
inline float Widen(int8_t x) { return static_cast<float>(x); }
inline float Widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

ROOFLAX_INLINE F16 LoadWide(const float* from) { return Load<F16>(from); }
ROOFLAX_INLINE F16 LoadWide(const uint16_t* from) {
  return As<F16>(LoadLanes(from) << 16);
}

ROOFLAX_INLINE F16 LoadWide(const int8_t* from) { return ToFloat(LoadLanes(from)); }

// e4m3: the exponent's bias is 7, the smallest step 2^-9; 0x7f is NaN and never stored.
struct E4m3 {
  uint8_t bits;
};

ROOFLAX_INLINE F16 FromE4m3(I16 byte) {
  const I16 size = byte & 0x7f;
  const I16 tiny = As<I16>(ToFloat(size) * 0x1p-9f);
  const I16 bits = Select(size >= 8, (size << 20) + (120 << 23), tiny);
  return As<F16>(bits | ((byte & 0x80) << 24));
}

ROOFLAX_INLINE F16 LoadWide(const E4m3* from) {
  return FromE4m3(LoadLanes(reinterpret_cast<const uint8_t*>(from)));
}

inline float Widen(E4m3 x) {
  float lane[kLanes];
  Store(lane, FromE4m3(I16{} + x.bits));
  return lane[0];
}

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

ROOFLAX_INLINE F16 LoadWide(const Half* from) {
#if defined(__AVX512F__)
  return As<F16>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  F16 out;
  ROOFLAX_EACH {
    const auto* bits = reinterpret_cast<const __m128i*>(from + i * kPieceLanes);
    out.at[i] = _mm256_cvtph_ps(_mm_loadu_si128(bits));
  }
  return out;
#elif defined(__aarch64__)
  F16 out;
  ROOFLAX_EACH out.at[i] = vcvt_f32_f16((float16x4_t)vld1_u16(&from[i * kPieceLanes].bits));
  return out;
#else
  float lane[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lane[i] = Widen(from[i]);
  return Load<F16>(lane);
#endif
}

ROOFLAX_INLINE H16 ToHalf(F16 x) {
#if defined(__AVX512F__)
  return reinterpret_cast<H16>(
      _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  const __m128i low = _mm256_cvtps_ph(x.at[0], _MM_FROUND_TO_NEAREST_INT);
  return (H16)_mm256_set_m128i(_mm256_cvtps_ph(x.at[1], _MM_FROUND_TO_NEAREST_INT), low);
#elif defined(__aarch64__)
  H16 out;
  float16x4_t halves[kPieces];
  ROOFLAX_EACH halves[i] = vcvt_f16_f32(x.at[i]);
  std::memcpy(&out, halves, sizeof(out));
  return out;
#else
  float lane[kLanes];
  Store(lane, x);
  H16 out;
  for (int64_t i = 0; i < kLanes; ++i) out[i] = HalfBits(lane[i]);
  return out;
#endif
}

// To nearest even; NaN stays NaN.
ROOFLAX_INLINE H16 ToBfloat16(F16 x) {
  const U16 bits = As<U16>(x);
  const U16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return LowHalves(Select(x != x, bits | 0x400000u, rounded) >> 16);
}

ROOFLAX_INLINE F16 Abs(F16 x) { return As<F16>(As<I16>(x) & 0x7fffffff); }

// Always in this order: halves on halves.
ROOFLAX_INLINE float Sum(F16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#elif defined(__aarch64__)
  const float32x4_t four = (x.at[0] + x.at[2]) + (x.at[1] + x.at[3]);
  return vaddv_f32(vget_low_f32(four) + vget_high_f32(four));
#else
  float lane[kLanes];
  Store(lane, x);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
#endif
}

// Sixteen vectors by their lanes: put(i, lane i of row(0) to row(15)).
template <typename Row, typename Put>
ROOFLAX_INLINE void Transpose(const Row& row, const Put& put) {
#if defined(__AVX512F__)
  __m512 quads[kLanes];  // of rows 4 g to 4 g + 3: quads[4 g + c] has the lanes c, 4 + c, 8 + c and 12 + c of each
  ROOFLAX_WHOLE
  for (int g = 0; g < 4; ++g) {
    const auto at = [&](int i) { return reinterpret_cast<__m512>(row(4 * g + i)); };
    const __m512 rows[] = {at(0), at(1), at(2), at(3)};
    const __m512 low = _mm512_shuffle_ps(rows[0], rows[1], 0x44), high = _mm512_shuffle_ps(rows[0], rows[1], 0xee);
    const __m512 low2 = _mm512_shuffle_ps(rows[2], rows[3], 0x44), high2 = _mm512_shuffle_ps(rows[2], rows[3], 0xee);
    quads[4 * g] = _mm512_shuffle_ps(low, low2, 0x88);
    quads[4 * g + 1] = _mm512_shuffle_ps(low, low2, 0xdd);
    quads[4 * g + 2] = _mm512_shuffle_ps(high, high2, 0x88);
    quads[4 * g + 3] = _mm512_shuffle_ps(high, high2, 0xdd);
  }
  ROOFLAX_WHOLE
  for (int c = 0; c < 4; ++c) {
    const __m512 even = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
    const __m512 odd2 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xdd);
    put(c, reinterpret_cast<F16>(_mm512_shuffle_f32x4(even, even2, 0x88)));
    put(4 + c, reinterpret_cast<F16>(_mm512_shuffle_f32x4(odd, odd2, 0x88)));
    put(8 + c, reinterpret_cast<F16>(_mm512_shuffle_f32x4(even, even2, 0xdd)));
    put(12 + c, reinterpret_cast<F16>(_mm512_shuffle_f32x4(odd, odd2, 0xdd)));
  }
#elif defined(__AVX2__)
  F16 rows[kLanes], lanes[kLanes];
  for (int r = 0; r < kLanes; ++r) rows[r] = row(r);
  for (int r = 0; r < 2; ++r) {  // rows 8 r to 8 r + 7, by lanes 8 h to 8 h + 7
    for (int h = 0; h < 2; ++h) {
      __m256 fours[8];  // of rows 8 r + 4 g to 8 r + 4 g + 3: fours[4 g + c] has the lanes c and 4 + c of each
      ROOFLAX_WHOLE
      for (int g = 0; g < 2; ++g) {
        const F16* four = rows + 8 * r + 4 * g;
        const __m256 low = _mm256_unpacklo_ps(four[0].at[h], four[1].at[h]);
        const __m256 high = _mm256_unpackhi_ps(four[0].at[h], four[1].at[h]);
        const __m256 low2 = _mm256_unpacklo_ps(four[2].at[h], four[3].at[h]);
        const __m256 high2 = _mm256_unpackhi_ps(four[2].at[h], four[3].at[h]);
        fours[4 * g] = _mm256_shuffle_ps(low, low2, 0x44);
        fours[4 * g + 1] = _mm256_shuffle_ps(low, low2, 0xee);
        fours[4 * g + 2] = _mm256_shuffle_ps(high, high2, 0x44);
        fours[4 * g + 3] = _mm256_shuffle_ps(high, high2, 0xee);
      }
      ROOFLAX_WHOLE
      for (int c = 0; c < 4; ++c) {
        lanes[8 * h + c].at[r] = _mm256_permute2f128_ps(fours[c], fours[4 + c], 0x20);
        lanes[8 * h + 4 + c].at[r] = _mm256_permute2f128_ps(fours[c], fours[4 + c], 0x31);
      }
    }
  }
  for (int i = 0; i < kLanes; ++i) put(i, lanes[i]);
#else
  float lanes[kLanes][kLanes];
  for (int r = 0; r < kLanes; ++r) {
    float of_row[kLanes];
    Store(of_row, row(r));
    for (int i = 0; i < kLanes; ++i) lanes[i][r] = of_row[i];
  }
  for (int i = 0; i < kLanes; ++i) put(i, Load<F16>(lanes[i]));
#endif
}

// Sixteen lines of sixteen words by columns: to[16 i + r] = rows[r][i].
inline void TransposeWords(const uint16_t* const* rows, uint16_t* to) {
#if defined(__AVX2__)
  for (int half = 0; half < 2; ++half) {  // columns 8 half to 8 half + 7, of the rows r and 8 + r beside each other
    __m256i lines[8];
    for (int r = 0; r < 8; ++r) {
      const auto* low = reinterpret_cast<const __m128i*>(rows[r]) + half;
      const auto* high = reinterpret_cast<const __m128i*>(rows[8 + r]) + half;
      lines[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
    }
    for (int turn = 0; turn < 3; ++turn) {  // each moves one bit of a word's place from its column to its row
      __m256i next[8];
      for (int r = 0; r < 4; ++r) {
        next[2 * r] = _mm256_unpacklo_epi16(lines[r], lines[4 + r]);
        next[2 * r + 1] = _mm256_unpackhi_epi16(lines[r], lines[4 + r]);
      }
      for (int r = 0; r < 8; ++r) lines[r] = next[r];
    }
    for (int i = 0; i < 8; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (8 * half + i) * kLanes), lines[i]);
    }
  }
#else
  for (int r = 0; r < kLanes; ++r) {
    for (int i = 0; i < kLanes; ++i) to[kLanes * i + r] = rows[r][i];
  }
#endif
}

// Sixteen sums at once, each in the order of Sum: out[i] = Sum(x[i]).
ROOFLAX_INLINE F16 SumEach(const F16 x[kLanes]) {
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
#elif defined(__AVX2__)
  const auto blocks = [x](int i) {  // four lanes of x[i], then four of x[8 + i]
    const __m256 first = _mm256_add_ps(x[i].at[0], x[i].at[1]);
    const __m256 second = _mm256_add_ps(x[8 + i].at[0], x[8 + i].at[1]);
    return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                         _mm256_permute2f128_ps(first, second, 0x31));
  };
  const auto pairs = [blocks](int i) {
    const __m256 a = blocks(i), b = blocks(i + 1);
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  };
  const auto fours = [pairs](int i) {
    const __m256 a = pairs(i), b = pairs(i + 2);
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  };
  const __m256 first = fours(0), second = fours(4);
  F16 out;
  out.at[0] = _mm256_permute2f128_ps(first, second, 0x20);
  out.at[1] = _mm256_permute2f128_ps(first, second, 0x31);
  return out;
#elif defined(__aarch64__)
  const auto four = [x](int i) { return (x[i].at[0] + x[i].at[2]) + (x[i].at[1] + x[i].at[3]); };
  const auto pairs = [four](int i) {
    const float64x2_t a = (float64x2_t)four(i), b = (float64x2_t)four(i + 1);
    return (float32x4_t)vzip1q_f64(a, b) + (float32x4_t)vzip2q_f64(a, b);
  };
  F16 out;
  ROOFLAX_EACH out.at[i] = vpaddq_f32(pairs(4 * i), pairs(4 * i + 2));
  return out;
#else
  float lane[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lane[i] = Sum(x[i]);
  return Load<F16>(lane);
#endif
}

// AVX2's own products of bytes, whose pairs are sums of 16 bits.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(ROOFLAX_VNNI)
#define ROOFLAX_PAIRS_OF_BYTES
#endif

// sums[lane] += sum over j of u[lane, j] * s[lane, j], for 16 lanes of 4 bytes; in DotRow x is a row's
// bytes, each kRowOffset too large, and w signed. AVX2 has no such product of unsigned bytes.
#if defined(__AVX512VNNI__)
constexpr int32_t kRowOffset = 128;
ROOFLAX_INLINE I16 Dot4(I16 sums, I16 u, I16 s) {
  return As<I16>(_mm512_dpbusd_epi32(As<__m512i>(sums), As<__m512i>(u), As<__m512i>(s)));
}
ROOFLAX_INLINE I16 DotRow(I16 sums, I16 x, I16 w) { return Dot4(sums, x, w); }
#elif defined(ROOFLAX_VNNI)
constexpr int32_t kRowOffset = 128;
ROOFLAX_INLINE __m256i DotPiece(__m256i sums, __m256i u, __m256i s) {
#if defined(ROOFLAX_VNNI_IN_PAIRS)  // the same where the processor has only AVX2, for tests
  const __m256i low = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, low), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
#else
  return _mm256_dpbusd_avx_epi32(sums, u, s);
#endif
}
ROOFLAX_INLINE I16 Dot4(I16 sums, I16 u, I16 s) {
  ROOFLAX_EACH sums.at[i] = (I16::Piece)DotPiece((__m256i)sums.at[i], (__m256i)u.at[i], (__m256i)s.at[i]);
  return sums;
}
ROOFLAX_INLINE I16 DotRow(I16 sums, I16 x, I16 w) { return Dot4(sums, x, w); }
#elif defined(__AVX2__)
constexpr int32_t kRowOffset = 0;
// Of 16 bits: pairs[lane, i] += sum of u[lane, j] * s[lane, j] over the two bytes j of pair i.
ROOFLAX_INLINE I16 AddPairs(I16 pairs, I16 u, I16 s) {
  ROOFLAX_EACH {
    const __m256i more = _mm256_maddubs_epi16((__m256i)u.at[i], (__m256i)s.at[i]);
    pairs.at[i] = (I16::Piece)_mm256_add_epi16((__m256i)pairs.at[i], more);
  }
  return pairs;
}
// sums[lane] += both of a lane's numbers of 16 bits.
ROOFLAX_INLINE I16 AddBoth(I16 sums, I16 pairs) {
  ROOFLAX_EACH {
    sums.at[i] += (I16::Piece)_mm256_madd_epi16((__m256i)pairs.at[i], _mm256_set1_epi16(1));
  }
  return sums;
}
// |w| times x with the sign of w: pairs of products fit into 16 bits, as unsigned x would not.
ROOFLAX_INLINE I16 DotRow(I16 sums, I16 x, I16 w) {
  I16 size, turned;
  ROOFLAX_EACH {
    size.at[i] = (I16::Piece)_mm256_abs_epi8((__m256i)w.at[i]);
    turned.at[i] = (I16::Piece)_mm256_sign_epi8((__m256i)x.at[i], (__m256i)w.at[i]);
  }
  return AddBoth(sums, AddPairs(I16{}, size, turned));
}
#elif defined(__aarch64__)
constexpr int32_t kRowOffset = 0;
// Of four lanes, and both signed. A product of bytes fits into 16 bits, the sum of two of -128 by -128 does not.
ROOFLAX_INLINE int32x4_t DotPiece(int32x4_t sums, int8x16_t x, int8x16_t w) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, x, w);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(w)));
  return vaddq_s32(sums, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(x, w))));
#endif
}
ROOFLAX_INLINE I16 DotRow(I16 sums, I16 x, I16 w) {
  ROOFLAX_EACH sums.at[i] = DotPiece(sums.at[i], (int8x16_t)x.at[i], (int8x16_t)w.at[i]);
  return sums;
}
#else
constexpr int32_t kRowOffset = 128;
ROOFLAX_INLINE I16 Dot4(I16 sums, I16 u, I16 s) {
  const U16 bits = As<U16>(u);
  for (int j = 0; j < 4; ++j) {
    const I16 left = As<I16>((bits >> (8 * j)) & 0xffu);
    const I16 right = (s << (24 - 8 * j)) >> 24;
    sums += left * right;
  }
  return sums;
}
ROOFLAX_INLINE I16 DotRow(I16 sums, I16 x, I16 w) { return Dot4(sums, x, w); }
#endif

// A float32 by its bits.
inline float FloatAt(const int32_t* bits) {
  float x;
  std::memcpy(&x, bits, sizeof(x));
  return x;
}

ROOFLAX_INLINE I16 BroadcastBytes(const void* four) {
  int32_t bits;
  std::memcpy(&bits, four, sizeof(bits));
  return I16{} + bits;
}

// Whether rows of two planes are multiplied as numbers of 16 bits: with AVX2 two of those take no longer than four
// bytes, whose products do not fit into 16 bits.
#if defined(ROOFLAX_PAIRS_OF_BYTES)
constexpr bool kWords = true;

// Four bytes of each lane as two pairs of 16 bits: the first and the third, the second and the fourth.
struct Words {
  I16 even, odd;
  template <bool kSigned>
  ROOFLAX_INLINE static Words Of(I16 bytes) {
    Words words;
    ROOFLAX_EACH {
      const auto both = (__m256i)bytes.at[i];
      words.odd.at[i] = (I16::Piece)(kSigned ? _mm256_srai_epi16(both, 8) : _mm256_srli_epi16(both, 8));
      words.even.at[i] = (I16::Piece)(kSigned ? _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8)
                                              : _mm256_and_si256(both, _mm256_set1_epi16(0xff)));
    }
    return words;
  }
};

// sums[lane] += the products of a lane's four numbers with a row's, which lie as `quantize_groups` left them.
ROOFLAX_INLINE I16 DotWords(I16 sums, const Words& w, const int8_t* x) {
  const I16 even = BroadcastBytes(x), odd = BroadcastBytes(x + 4);
  ROOFLAX_EACH {
    sums.at[i] += (I16::Piece)_mm256_madd_epi16((__m256i)w.even.at[i], (__m256i)even.at[i]);
    sums.at[i] += (I16::Piece)_mm256_madd_epi16((__m256i)w.odd.at[i], (__m256i)odd.at[i]);
  }
  return sums;
}
#else
constexpr bool kWords = false;
#endif

// From here on the compiler knows nothing of what `pointer` points to: it loads that where it is needed,
// and does not keep on the stack what it has loaded before.
template <typename T>
ROOFLAX_INLINE void Hide(T*& pointer) {
  asm("" : "+r"(pointer));
}

// Here and now in registers: not read again by every instruction that uses it, nor put off until more
// numbers are under way than there are registers.
template <typename V>
ROOFLAX_INLINE void KeepInRegister(V& x) {
#if defined(__AVX512F__) && !defined(ROOFLAX_AVX512_IN_LANES_H_)
  asm("" : "+v"(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  ROOFLAX_EACH asm("" : "+x"(x.at[i]));
#elif defined(__aarch64__)
  ROOFLAX_EACH asm("" : "+w"(x.at[i]));
#else
  (void)x;
#endif
}

// In memory, as registers are needed for others.
template <typename V>
ROOFLAX_INLINE void KeepInMemory(V& x) {
  asm("" : "+m"(x));
}

#if defined(__AVX512F__)
ROOFLAX_INLINE bool AnyLane(I16 x) { return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(x),
                                                           reinterpret_cast<__m512i>(x)) != 0; }
ROOFLAX_INLINE float Largest(F16 x) { return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x)); }
ROOFLAX_INLINE int32_t SumWhole(I16 x) { return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x)); }
#elif defined(__AVX2__)
ROOFLAX_INLINE bool AnyLane(I16 x) {
  const auto any = (__m256i)(x.at[0] | x.at[1]);
  return !_mm256_testz_si256(any, any);
}
ROOFLAX_INLINE float Largest(F16 x) {
  const __m256 eight = _mm256_max_ps(x.at[0], x.at[1]);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
ROOFLAX_INLINE int32_t SumWhole(I16 x) {
  const auto eight = (__m256i)(x.at[0] + x.at[1]);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_hadd_epi32(four, four);
  return _mm_cvtsi128_si32(_mm_hadd_epi32(four, four));
}
#elif defined(__aarch64__)
ROOFLAX_INLINE bool AnyLane(I16 x) {
  return vmaxvq_u32((uint32x4_t)((x.at[0] | x.at[1]) | (x.at[2] | x.at[3]))) != 0;
}
ROOFLAX_INLINE float Largest(F16 x) {
  return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x.at[0], x.at[1]), vmaxnmq_f32(x.at[2], x.at[3])));
}
ROOFLAX_INLINE int32_t SumWhole(I16 x) { return vaddvq_s32((x.at[0] + x.at[1]) + (x.at[2] + x.at[3])); }
#else
ROOFLAX_INLINE bool AnyLane(I16 x) {
  int32_t lane[kLanes], any = 0;
  Store(lane, x);
  for (int32_t each : lane) any |= each;
  return any != 0;
}
ROOFLAX_INLINE float Largest(F16 x) {
  float lane[kLanes];
  Store(lane, x);
  return *std::max_element(lane, lane + kLanes);
}
ROOFLAX_INLINE int32_t SumWhole(I16 x) {
  int32_t lane[kLanes], sum = 0;
  Store(lane, x);
  for (int32_t each : lane) sum += each;
  return sum;
}
#endif

// Bytes of a table of sixteen, by their numbers.
ROOFLAX_INLINE I16 LookUp(const uint8_t* table, I16 bytes) {
#if defined(__AVX512BW__)
  const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return As<I16>(_mm512_shuffle_epi8(values, As<__m512i>(bytes)));
#elif defined(__AVX2__)
  const __m256i values =
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  ROOFLAX_EACH bytes.at[i] = (I16::Piece)_mm256_shuffle_epi8(values, (__m256i)bytes.at[i]);
  return bytes;
#elif defined(__aarch64__)
  ROOFLAX_EACH bytes.at[i] = (I16::Piece)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)bytes.at[i]);
  return bytes;
#else
  uint8_t number[64];
  Store(number, bytes);
  for (auto& n : number) n = table[n];
  return Load<I16>(number);
#endif
}

// Lanes of a table, by the low four bits of each number.
ROOFLAX_INLINE F16 TakeLanes(F16 table, U16 numbers) {
#if defined(__AVX512F__)
  return reinterpret_cast<F16>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(numbers),
                                                     reinterpret_cast<__m512>(table)));
#elif defined(__AVX2__)
  F16 taken;
  ROOFLAX_EACH {
    const auto index = (__m256i)numbers.at[i];
    const __m256 low = _mm256_permutevar8x32_ps(table.at[0], index);
    const __m256 high = _mm256_permutevar8x32_ps(table.at[1], index);
    taken.at[i] = _mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(index, 28));
  }
  return taken;
#elif defined(__aarch64__)
  const uint8x16x4_t bytes = {{(uint8x16_t)table.at[0], (uint8x16_t)table.at[1], (uint8x16_t)table.at[2],
                               (uint8x16_t)table.at[3]}};
  ROOFLAX_EACH {
    const auto index = (uint8x16_t)((numbers.at[i] & 15u) * 0x04040404u + 0x03020100u);
    table.at[i] = (F16::Piece)vqtbl4q_u8(bytes, index);
  }
  return table;
#else
  float lane[kLanes];
  uint32_t number[kLanes];
  Store(lane, table);
  Store(number, numbers);
  float taken[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) taken[i] = lane[number[i] & 15];
  return Load<F16>(taken);
#endif
}

// e to the x for x <= 0, to 2 units in the last place; below -87 it is 0.
ROOFLAX_INLINE F16 Exp(F16 x) {
  const F16 floor_at = Broadcast(-87.0f);
  const I16 visible = x > floor_at;
  x = Select(visible, x, floor_at);
  const F16 scaled = x * 1.44269504f;
  const I16 whole = ToWhole(scaled - 0.5f);  // towards zero: rounds to nearest
  const F16 n = ToFloat(whole);
  const F16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  F16 p = Broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const F16 power = As<F16>((whole + 127) << 23);
  return As<F16>(As<I16>(p * power) & visible);
}

ROOFLAX_INLINE F16 Tanh(F16 x) {
  const F16 small = Exp(-2.0f * Abs(x));
  const F16 size = (1.0f - small) / (1.0f + small);
  return Select(x >= F16{}, size, -size);
}

// The natural logarithm of a positive normal number, to 2 units in the last place.
ROOFLAX_INLINE F16 Log(F16 x) {
  const I16 bits = As<I16>(x);
  F16 m = As<F16>((bits & 0x007fffff) | 0x3f000000);  // x = m * 2^e, m in [0.5, 1)
  const I16 small = m < Broadcast(0.707106781f);
  const F16 e = ToFloat((bits >> 23) - 126 + small);  // `small` is -1 where it holds
  m = Select(small, m + m, m) - 1.0f;
  const F16 z = m * m;
  F16 p = Broadcast(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  return m + (m * z * p - e * 2.12194440e-4f - z * 0.5f) + e * 0.693359375f;
}

// sum + x[begin, end) * w[begin, end), compiled once: whether a product is rounded before it is added is
// the compiler's choice, and all rows and tiles have to have the same.
template <typename W>
[[gnu::noinline]] float AddTail(float sum, const float* x, const W* w, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    asm volatile("" ::: "memory");  // else GCC multiplies in vectors, and rounds before it adds
    sum += x[k] * Widen(w[k]);
  }
  return sum;
}
