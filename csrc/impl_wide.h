// Vectors of sixteen lanes and what every processor can do with them. Part of kernels_impl.h.

constexpr int64_t kLanes = 16;
// kRegisters  vectors of sixteen floats that registers hold
// kStreams    places that a thread reads one row's weights from at once, as many as memory answers best
// kCodeStreams  the same of codes with activations in bytes
#if defined(__AVX512F__)
constexpr int64_t kRegisters = 32, kStreams = ROOFLAX_STREAMS, kCodeStreams = ROOFLAX_CODE_STREAMS;
#elif defined(__AVX2__)
constexpr int64_t kRegisters = 8, kStreams = 4, kCodeStreams = 1;
#elif defined(__aarch64__)
constexpr int64_t kRegisters = 8, kStreams = 1, kCodeStreams = 1;
#else
constexpr int64_t kRegisters = 4, kStreams = 1, kCodeStreams = 1;
#endif
constexpr bool kFarApart = kStreams > 1, kCodesApart = kCodeStreams > 1;
// Bytes ahead that are fetched in each of several places: the processor itself fetches further.
constexpr int64_t kStreamAhead = 1024;

typedef uint16_t H16 __attribute__((vector_size(32)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef int8_t B16 __attribute__((vector_size(16)));

// Memory of any alignment.
template <typename V>
struct Memory {
  static V Load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
  }
  static void Store(void* to, V value) { std::memcpy(to, &value, sizeof(V)); }
};
template <typename V>
inline V Load(const void* from) {
  return Memory<V>::Load(from);
}
template <typename V>
inline void Store(void* to, V value) {
  Memory<V>::Store(to, value);
}

#if defined(__AVX512F__)

#define ROOFLAX_WHOLE
#define ROOFLAX_INLINE inline
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));

// The same bits.
template <typename To, typename From>
inline To As(From x) {
  return reinterpret_cast<To>(x);
}

// The same numbers; of floats towards zero.
inline F16 ToFloat(I16 x) { return __builtin_convertvector(x, F16); }
inline I16 ToWhole(F16 x) { return __builtin_convertvector(x, I16); }

// Lanes of a where the mask is set, of b elsewhere.
template <typename V>
inline V Select(I16 mask, V a, V b) {
  return mask ? a : b;
}

inline U16 LoadLanes(const uint16_t* from) {
#if defined(ROOFLAX_AVX512_IN_LANES_H_)
  return __builtin_convertvector(Load<H16>(from), U16);
#else  // one instruction, where GCC makes five
  return reinterpret_cast<U16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#endif
}
inline I16 LoadLanes(const int8_t* from) { return __builtin_convertvector(Load<B16>(from), I16); }
inline I16 LoadLanes(const uint8_t* from) {
  return __builtin_convertvector(Load<U8x16>(from), I16);
}

// The low bits of each lane.
inline H16 LowHalves(U16 x) { return __builtin_convertvector(x, H16); }
inline B16 LowBytes(I16 x) { return __builtin_convertvector(x, B16); }

#else

// GCC keeps vectors that are wider than the processor's in memory, and pieces of them in registers.
#if defined(__AVX2__)
constexpr int kPieceBytes = 32;
#else
constexpr int kPieceBytes = 16;
#endif
constexpr int kPieces = 64 / kPieceBytes, kPieceLanes = kPieceBytes / 4;
#define ROOFLAX_EACH _Pragma("GCC unroll 4") for (int i = 0; i < kPieces; ++i)
// Before a short loop over an array of them: numbered by a variable they are in memory as well.
#define ROOFLAX_WHOLE _Pragma("GCC unroll 16")
// And what takes or returns one passes it through memory, unless it is part of its caller.
#define ROOFLAX_INLINE [[gnu::always_inline]] inline

template <typename T>
struct Wide {
  typedef T Piece __attribute__((vector_size(kPieceBytes)));
  Piece at[kPieces];
};
using F16 = Wide<float>;
using I16 = Wide<int32_t>;
using U16 = Wide<uint32_t>;

// Piece by piece: copied as a whole they would pass through memory.
template <typename T>
struct Memory<Wide<T>> {
  using Piece = typename Wide<T>::Piece;
  static Wide<T> Load(const void* from) {
    Wide<T> value;
    ROOFLAX_EACH value.at[i] = Memory<Piece>::Load(static_cast<const char*>(from) + i * kPieceBytes);
    return value;
  }
  static void Store(void* to, Wide<T> value) {
    ROOFLAX_EACH Memory<Piece>::Store(static_cast<char*>(to) + i * kPieceBytes, value.at[i]);
  }
};

// A number beside a vector takes the vector's type.
template <typename T>
struct ItselfOf {
  using Type = T;
};
template <typename T>
using Itself = typename ItselfOf<T>::Type;

template <typename T>
ROOFLAX_INLINE Wide<T> Repeated(T x) {
  Wide<T> out{};
  ROOFLAX_EACH out.at[i] = out.at[i] + x;
  return out;
}

#define ROOFLAX_BINARY(op)                                                         \
  template <typename T>                                                            \
  ROOFLAX_INLINE Wide<T> operator op(Wide<T> a, Wide<T> b) {                       \
    ROOFLAX_EACH a.at[i] = a.at[i] op b.at[i];                                     \
    return a;                                                                      \
  }                                                                                \
  template <typename T>                                                            \
  ROOFLAX_INLINE Wide<T> operator op(Wide<T> a, Itself<T> b) {                     \
    ROOFLAX_EACH a.at[i] = a.at[i] op b;                                           \
    return a;                                                                      \
  }                                                                                \
  template <typename T>                                                            \
  ROOFLAX_INLINE Wide<T> operator op(Itself<T> a, Wide<T> b) {                     \
    ROOFLAX_EACH b.at[i] = a op b.at[i];                                           \
    return b;                                                                      \
  }                                                                                \
  template <typename T, typename B>                                                \
  ROOFLAX_INLINE Wide<T>& operator op##=(Wide<T>& a, B b) {                        \
    a = a op b;                                                                    \
    return a;                                                                      \
  }
ROOFLAX_BINARY(+)
ROOFLAX_BINARY(-)
ROOFLAX_BINARY(*)
ROOFLAX_BINARY(/)
ROOFLAX_BINARY(&)
ROOFLAX_BINARY(|)
ROOFLAX_BINARY(^)
#undef ROOFLAX_BINARY

template <typename T>
ROOFLAX_INLINE Wide<T> operator<<(Wide<T> a, int by) {
  ROOFLAX_EACH a.at[i] = a.at[i] << by;
  return a;
}
template <typename T>
ROOFLAX_INLINE Wide<T> operator>>(Wide<T> a, int by) {
  ROOFLAX_EACH a.at[i] = a.at[i] >> by;
  return a;
}
template <typename T>
ROOFLAX_INLINE Wide<T> operator-(Wide<T> a) {
  ROOFLAX_EACH a.at[i] = -a.at[i];
  return a;
}
template <typename T>
ROOFLAX_INLINE Wide<T> operator~(Wide<T> a) {
  ROOFLAX_EACH a.at[i] = ~a.at[i];
  return a;
}

#define ROOFLAX_COMPARE(op)                                                        \
  template <typename T>                                                            \
  ROOFLAX_INLINE I16 operator op(Wide<T> a, Wide<T> b) {                           \
    I16 out;                                                                       \
    ROOFLAX_EACH out.at[i] = a.at[i] op b.at[i];                                   \
    return out;                                                                    \
  }                                                                                \
  template <typename T>                                                            \
  ROOFLAX_INLINE I16 operator op(Wide<T> a, Itself<T> b) {                         \
    return a op Repeated<T>(b);                                                    \
  }
ROOFLAX_COMPARE(<)
ROOFLAX_COMPARE(<=)
ROOFLAX_COMPARE(>)
ROOFLAX_COMPARE(>=)
ROOFLAX_COMPARE(==)
ROOFLAX_COMPARE(!=)
#undef ROOFLAX_COMPARE

template <typename To, typename T>
ROOFLAX_INLINE To As(Wide<T> x) {
  To out;
  ROOFLAX_EACH out.at[i] = reinterpret_cast<decltype(out.at[i] + out.at[i])>(x.at[i]);
  return out;
}

ROOFLAX_INLINE F16 ToFloat(I16 x) {
  F16 out;
  ROOFLAX_EACH out.at[i] = __builtin_convertvector(x.at[i], F16::Piece);
  return out;
}
ROOFLAX_INLINE I16 ToWhole(F16 x) {
  I16 out;
  ROOFLAX_EACH out.at[i] = __builtin_convertvector(x.at[i], I16::Piece);
  return out;
}

template <typename T>
ROOFLAX_INLINE Wide<T> Select(I16 mask, Wide<T> a, Wide<T> b) {
  ROOFLAX_EACH a.at[i] = mask.at[i] ? a.at[i] : b.at[i];
  return a;
}

template <typename To, typename T>
ROOFLAX_INLINE To LoadEach(const T* from) {
  typedef T Part __attribute__((vector_size(kPieceLanes * sizeof(T))));
  To out;
  ROOFLAX_EACH {
    out.at[i] = __builtin_convertvector(Load<Part>(from + i * kPieceLanes), typename To::Piece);
  }
  return out;
}
#if defined(__aarch64__)  // GCC widens and narrows byte by byte
ROOFLAX_INLINE U16 LoadLanes(const uint16_t* from) {
  const uint16x8_t low = vld1q_u16(from), high = vld1q_u16(from + 8);
  return {{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)}};
}
ROOFLAX_INLINE I16 LoadLanes(const int8_t* from) {
  const int8x16_t all = vld1q_s8(from);
  const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}
ROOFLAX_INLINE I16 LoadLanes(const uint8_t* from) {
  const uint8x16_t all = vld1q_u8(from);
  const int16x8_t low = (int16x8_t)vmovl_u8(vget_low_u8(all)), high = (int16x8_t)vmovl_high_u8(all);
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}
#else
ROOFLAX_INLINE U16 LoadLanes(const uint16_t* from) { return LoadEach<U16>(from); }
ROOFLAX_INLINE I16 LoadLanes(const int8_t* from) { return LoadEach<I16>(from); }
ROOFLAX_INLINE I16 LoadLanes(const uint8_t* from) { return LoadEach<I16>(from); }
#endif

#if defined(__AVX2__)
ROOFLAX_INLINE H16 LowHalves(U16 x) {
  x = x & 0xffffu;
  const __m256i mixed = _mm256_packus_epi32((__m256i)x.at[0], (__m256i)x.at[1]);
  return (H16)_mm256_permute4x64_epi64(mixed, 0xd8);
}
ROOFLAX_INLINE B16 LowBytes(I16 x) {
  const auto halves = (__m256i)LowHalves(As<U16>(x & 0xff));
  return (B16)_mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
#elif defined(__aarch64__)
ROOFLAX_INLINE H16 LowHalves(U16 x) {
  H16 out;
  const uint16x8_t halves[] = {vuzp1q_u16((uint16x8_t)x.at[0], (uint16x8_t)x.at[1]),
                               vuzp1q_u16((uint16x8_t)x.at[2], (uint16x8_t)x.at[3])};
  std::memcpy(&out, halves, sizeof(out));
  return out;
}
ROOFLAX_INLINE B16 LowBytes(I16 x) {
  const int16x8_t low = vuzp1q_s16((int16x8_t)x.at[0], (int16x8_t)x.at[1]);
  const int16x8_t high = vuzp1q_s16((int16x8_t)x.at[2], (int16x8_t)x.at[3]);
  return (B16)vuzp1q_s8((int8x16_t)low, (int8x16_t)high);
}
#else
template <typename To, typename Part, typename T>
ROOFLAX_INLINE To Narrowed(Wide<T> x) {
  Part parts[kPieces];
  ROOFLAX_EACH parts[i] = __builtin_convertvector(x.at[i], Part);
  return Load<To>(parts);
}
ROOFLAX_INLINE H16 LowHalves(U16 x) {
  typedef uint16_t Part __attribute__((vector_size(kPieceLanes * 2)));
  return Narrowed<H16, Part>(x);
}
ROOFLAX_INLINE B16 LowBytes(I16 x) {
  typedef int8_t Part __attribute__((vector_size(kPieceLanes)));
  return Narrowed<B16, Part>(x);
}
#endif

#endif

ROOFLAX_INLINE F16 Broadcast(float x) { return F16{} + x; }
