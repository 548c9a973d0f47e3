// Matmuls with weights in ggml's block types. Part of kernels_impl.h.
//
// A group of 32 inputs of 16 outputs lies in as many lines of 64 bytes as its codes have bits. With quad
// q the four inputs from 4 q on, of sixteen outputs:
//   two bits     line q / 4 has quad q, 2 (q % 4) bits up
//   three bits   as two bits, and a line whose bit q of every byte is the third bit of quad q
//   four bits    line q % 4 has quad q, in the low halves of its bytes for q < 4, else in the high ones
//   five bits    as four bits, and a line whose bit q of every byte is the fifth bit of quad q
//   six bits     as four bits, and two lines with the upper two bits, each as of two bits
//
// A type gives the quads as unsigned bytes, kZero too large, and per part of a group (all of it, or each
// half) a scale, and where it has them a minimum: a weight is scale * (code - kZero) - minimum.

// Scales of a group, as BlockScales says. A float16 of each lane:
ROOFLAX_INLINE F16 LowHalf(I16 words) {
#if defined(__AVX512F__)
  return As<F16>(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(As<__m512i>(words))));
#else
  Half lane[kLanes];
  const H16 low = LowHalves(As<U16>(words));
  Store(lane, low);
  return LoadWide(lane);
#endif
}
ROOFLAX_INLINE F16 HighHalf(I16 words) { return LowHalf(As<I16>(As<U16>(words) >> 16)); }

// Bits [low, low + bits) of quad q from lines that hold 8 / bits quads each, shifted up by `to`.
template <int kBits, int kTo>
ROOFLAX_INLINE U16 PlaneBits(U16 line, int64_t q) {
  constexpr uint32_t kMask = 0x01010101u * ((1u << kBits) - 1u) << kTo;
  const int64_t at = q % (8 / kBits) * kBits;
  return (at <= kTo ? line << (kTo - at) : line >> (at - kTo)) & kMask;
}

template <int kBits>
ROOFLAX_INLINE U16 QuadOf(const uint8_t* lines, int64_t q) {
  const auto line = [lines](int64_t i) { return Load<U16>(lines + i * 64); };
  if constexpr (kBits == 2) return PlaneBits<2, 0>(line(q / 4), q);
  if constexpr (kBits == 3) return QuadOf<2>(lines, q) | PlaneBits<1, 2>(line(2), q);
  if constexpr (kBits == 4) return (q < 4 ? line(q) : line(q - 4) >> 4) & 0x0f0f0f0fu;
  if constexpr (kBits == 5) return QuadOf<4>(lines, q) | PlaneBits<1, 4>(line(4), q);
  if constexpr (kBits == 6) return QuadOf<4>(lines, q) | PlaneBits<2, 4>(line(4 + q / 4), q);
}

// Linear codes.
template <int kBits_, int64_t kZero_>
struct Linear {
  static constexpr int kBits = kBits_;
  static constexpr int64_t kZero = kZero_;
  static constexpr bool kFitsTwice = true;  // four products of a code fit into 16 bits
  ROOFLAX_INLINE static I16 Unsigned(const uint8_t* lines, int64_t q) { return As<I16>(QuadOf<kBits>(lines, q)); }
};

// Sixteen numbers, not evenly spaced, 128 too large.
struct Iq4 {
  static constexpr int kBits = 4;
  static constexpr int64_t kZero = 128;
  static constexpr bool kFitsTwice = false;
  ROOFLAX_INLINE static I16 Unsigned(const uint8_t* lines, int64_t q) {
    alignas(16) static constexpr uint8_t kTable[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                       129, 141, 153, 166, 181, 197, 217, 241};
    return LookUp(kTable, As<I16>(QuadOf<4>(lines, q)));
  }
};

template <int64_t kParts>
struct Factors {
  F16 scale[kParts], minimum[kParts];
};

struct HalfScales {
  static constexpr int64_t kParts = 1;
  static constexpr bool kHasMinimum = false;
  ROOFLAX_INLINE static Factors<1> Of(const PackedArgs& a, int64_t panel, int64_t g) {
    const int64_t block = panel * (a.stride / kGroup) + g;
    return {{LoadWide(static_cast<const Half*>(a.w_scale) + block * kPanel)}, {F16{}}};
  }
};

struct PairScales {
  static constexpr int64_t kParts = 1;
  static constexpr bool kHasMinimum = true;
  ROOFLAX_INLINE static Factors<1> Of(const PackedArgs& a, int64_t panel, int64_t g) {
    const int64_t block = panel * (a.stride / kGroup) + g;
    const I16 words = Load<I16>(static_cast<const int32_t*>(a.w_scale) + block * kPanel);
    return {{LowHalf(words)}, {F16{} - HighHalf(words)}};
  }
};

// The shared float16s of a group, and its two bytes in the low half of each lane.
struct Super {
  I16 shared, own;
  ROOFLAX_INLINE static Super Of(const PackedArgs& a, int64_t panel, int64_t g) {
    const int64_t supers = a.stride / kGroup / a.super_groups, lines = 1 + (a.super_groups + 1) / 2;
    const int64_t i = g % a.super_groups;
    const auto* from = static_cast<const int32_t*>(a.w_scale);
    from += (panel * supers + g / a.super_groups) * lines * kPanel;
    return {Load<I16>(from), Load<I16>(from + (1 + i / 2) * kPanel) >> static_cast<int32_t>(i % 2 * 16)};
  }
  ROOFLAX_INLINE I16 Low() const { return own & 0xff; }
  ROOFLAX_INLINE I16 High() const { return (own >> 8) & 0xff; }
};

// The first byte scales the first shared number, the second the other, which is taken away.
struct SuperWithMinimum {
  static constexpr int64_t kParts = 1;
  static constexpr bool kHasMinimum = true;
  ROOFLAX_INLINE static Factors<1> Of(const PackedArgs& a, int64_t panel, int64_t g) {
    const Super from = Super::Of(a, panel, g);
    return {{LowHalf(from.shared) * ToFloat(from.Low())}, {HighHalf(from.shared) * ToFloat(from.High())}};
  }
};

// Each byte scales a half of the group, signed.
template <int64_t kParts_>
struct SuperOfParts {
  static constexpr int64_t kParts = kParts_;
  static constexpr bool kHasMinimum = false;
  ROOFLAX_INLINE static Factors<kParts> Of(const PackedArgs& a, int64_t panel, int64_t g) {
    const Super from = Super::Of(a, panel, g);
    Factors<kParts> found;
    const F16 shared = LowHalf(from.shared);
    found.scale[0] = shared * ToFloat((from.own << 24) >> 24);
    if constexpr (kParts == 2) found.scale[1] = shared * ToFloat((from.own << 16) >> 24);
    return found;
  }
};

// Each byte is of a half of the group: a scale in its low four bits, a minimum in the others.
struct SuperOfNibbles {
  static constexpr int64_t kParts = 2;
  static constexpr bool kHasMinimum = true;
  ROOFLAX_INLINE static Factors<2> Of(const PackedArgs& a, int64_t panel, int64_t g) {
    const Super from = Super::Of(a, panel, g);
    const F16 scale = LowHalf(from.shared), minimum = HighHalf(from.shared);
    const I16 bytes[] = {from.Low(), from.High()};
    Factors<2> found;
    for (int i = 0; i < 2; ++i) {
      found.scale[i] = scale * ToFloat(bytes[i] & 15);
      found.minimum[i] = minimum * ToFloat(bytes[i] >> 4);
    }
    return found;
  }
};

template <typename Codes_, typename Scales_>
struct BlockType {
  using Codes = Codes_;
  using Scales = Scales_;
  static constexpr int64_t kBytes = Codes::kBits * 64;  // of a group
  static constexpr int64_t kParts = Scales::kParts, kQuads = 8 / kParts;
};
using Q4_1 = BlockType<Linear<4, 0>, PairScales>;
using Q5_0 = BlockType<Linear<5, 16>, HalfScales>;
using Q5_1 = BlockType<Linear<5, 0>, PairScales>;
using Q2K = BlockType<Linear<2, 0>, SuperOfNibbles>;
using Q3K = BlockType<Linear<3, 4>, SuperOfParts<2>>;
using Q4K = BlockType<Linear<4, 0>, SuperWithMinimum>;
using Q5K = BlockType<Linear<5, 0>, SuperWithMinimum>;
using Q6K = BlockType<Linear<6, 32>, SuperOfParts<2>>;
using Iq4Nl = BlockType<Iq4, HalfScales>;
using Iq4Xs = BlockType<Iq4, SuperOfParts<1>>;

// What `use` makes of the type of a code.
template <typename Use>
void WithBlockType(Code code, Use use) {
  switch (code) {
    case Code::kQ4_1: return use(Q4_1{});
    case Code::kQ5_0: return use(Q5_0{});
    case Code::kQ5_1: return use(Q5_1{});
    case Code::kQ2K: return use(Q2K{});
    case Code::kQ3K: return use(Q3K{});
    case Code::kQ4K: return use(Q4K{});
    case Code::kQ5K: return use(Q5K{});
    case Code::kQ6K: return use(Q6K{});
    case Code::kIq4Nl: return use(Iq4Nl{});
    case Code::kIq4Xs: return use(Iq4Xs{});
    default: return;
  }
}

template <typename Type>
struct QuadTile {
  using Codes = typename Type::Codes;
  static constexpr int64_t kParts = Type::kParts, kQuads = Type::kQuads;
  static int64_t PanelBytes(int64_t stride) { return stride / kGroup * Type::kBytes; }

  static constexpr int64_t Panels(int64_t rows) {
    return rows == 1 && kFarApart ? kStreams : rows <= kPanelRows && kRegisters >= 32 ? 2 : 1;
  }

  // The products of a part of a group with M rows, whole numbers: of codes as unsigned bytes.
  template <int64_t M>
  ROOFLAX_INLINE static void Dots(const int8_t* x, const uint8_t* w, int64_t part, I16 (&sums)[M]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    constexpr int64_t kTogether = !Codes::kFitsTwice ? 1 : Codes::kBits == 6 ? 2 : 4;
    ROOFLAX_WHOLE
    for (int64_t quad = 0; quad < kQuads; quad += kTogether) {
      I16 pairs[M];
      ROOFLAX_WHOLE
      for (auto& pair : pairs) pair = I16{};
      ROOFLAX_WHOLE
      for (int64_t i = 0; i < kTogether; ++i) {
        const int64_t q = part * kQuads + quad + i;
        const I16 codes = Codes::Unsigned(w, q);
        ROOFLAX_WHOLE
        for (int64_t m = 0; m < M; ++m) {
          const I16 value = BroadcastBytes(x + m * kGroup + q * 4);
          if constexpr (Codes::kFitsTwice) {
            pairs[m] = AddPairs(pairs[m], codes, value);
            KeepInRegister(pairs[m]);
          } else {  // codes 128 too large: signed ones, whose products fit
            sums[m] = DotRow(sums[m], value, As<I16>(As<U16>(codes) ^ 0x80808080u));
          }
        }
      }
      ROOFLAX_WHOLE
      for (int64_t m = 0; m < M && Codes::kFitsTwice; ++m) sums[m] = AddBoth(sums[m], pairs[m]);
    }
#else
    I16 codes[kQuads];
    ROOFLAX_WHOLE
    for (int64_t q = 0; q < kQuads; ++q) codes[q] = Codes::Unsigned(w, part * kQuads + q);
    ROOFLAX_WHOLE
    for (int64_t m = 0; m < M; ++m) {
      ROOFLAX_WHOLE
      for (int64_t q = 0; q < kQuads; ++q) {
        sums[m] = Dot4(sums[m], codes[q], BroadcastBytes(x + m * kGroup + (part * kQuads + q) * 4));
      }
    }
#endif
  }

  // Where codes are multiplied as signed numbers, nothing is to be taken away.
#if defined(__AVX2__) && !defined(__AVX512F__)
  static constexpr bool kStarts = Codes::kZero != 0 && Codes::kFitsTwice;
#else
  static constexpr bool kStarts = Codes::kZero != 0;
#endif

  template <int64_t M, int64_t P, typename Fetch>
  static void Run(const PackedArgs& a, int64_t row, int64_t panel, int64_t apart, Fetch fetch) {
    const int64_t groups = a.stride / kGroup, panel_bytes = PanelBytes(a.stride);
    const auto* x = static_cast<const int8_t*>(a.x) + row * a.stride;
    const float* x_scale = a.x_scale + row * groups;
    const int32_t* x_start = a.x_start + row * groups * kParts;
    F16 totals[P][M];
    ROOFLAX_WHOLE
    for (auto& line : totals) {
      ROOFLAX_WHOLE
      for (auto& total : line) total = F16{};
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t ahead = fetch.template Ahead<P>(g * Type::kBytes, panel_bytes, apart);
      ROOFLAX_WHOLE
      for (int64_t p = 0; p < P; ++p) {
        const uint8_t* w = a.w + (panel + p * apart) * panel_bytes + g * Type::kBytes;
        Prefetch(w + ahead, Codes::kBits);
        const Factors<kParts> factors = Type::Scales::Of(a, panel + p * apart, g);
        ROOFLAX_WHOLE
        for (int64_t part = 0; part < kParts; ++part) {
          const int32_t* start = x_start + (g * kParts + part) * M;
          I16 sums[M];
          ROOFLAX_WHOLE
          for (int64_t m = 0; m < M; ++m) sums[m] = kStarts ? I16{} + start[m] : I16{};
          Dots<M>(x + g * M * kGroup, w, part, sums);
          ROOFLAX_WHOLE
          for (int64_t m = 0; m < M; ++m) {
            const float own = x_scale[g * M + m];
            totals[p][m] += ToFloat(sums[m]) * (factors.scale[part] * own);
            if constexpr (Type::Scales::kHasMinimum) {
              totals[p][m] -= factors.minimum[part] * (own * static_cast<float>(start[m]));
            }
            if constexpr (kRegisters >= 32 && P * M > 8) KeepInMemory(totals[p][m]);
          }
        }
      }
    }
    ROOFLAX_WHOLE
    for (int64_t p = 0; p < P; ++p) {
      ROOFLAX_WHOLE
      for (int64_t m = 0; m < M; ++m) FinishPanel(a.out, row + m, panel + p * apart, totals[p][m]);
    }
  }
};

// A group's weights in float32, for `WideTile`.
template <typename Type>
struct BlockWide {
  static constexpr bool kGrouped = true;
  static constexpr int64_t kBytes = Type::kBytes;
  static void Widen(const PackedArgs& a, int64_t block, const uint8_t* from, int64_t, F16* w) {
    const int64_t groups = a.stride / kGroup;
    const auto factors = Type::Scales::Of(a, block / groups, block % groups);
    ROOFLAX_WHOLE
    for (int64_t q = 0; q < 8; ++q) {
      const I16 codes = Type::Codes::Unsigned(from, q);
      const int64_t part = q / Type::kQuads;
      for (int64_t j = 0; j < 4; ++j) {
        const I16 code = ((codes >> static_cast<int32_t>(8 * j)) & 0xff) - static_cast<int32_t>(Type::Codes::kZero);
        F16 value = ToFloat(code) * factors.scale[part];
        if constexpr (Type::Scales::kHasMinimum) value -= factors.minimum[part];
        w[q * 4 + j] = value;
      }
    }
  }
};

// ---- Every code ----

void Bytes(const PackedArgs& a) {
  switch (a.code) {
    case Code::kInt8: return AllRows<Int8Tile>(a);
    case Code::kInt8Groups: return AllRows<GroupTile<Int8Group>>(a);
    case Code::kInt4: return AllRows<GroupTile<Int4Group>>(a);
    case Code::kMxfp4: return AllRows<GroupTile<Mxfp4Group>>(a);
    default: return WithBlockType(a.code, [&](auto type) { AllRows<QuadTile<decltype(type)>>(a); });
  }
}

void Packed(const PackedArgs& a) {
  switch (a.code) {
    case Code::kInt8: return PackedCode<ByteWide<Int8Byte>>(a);
    case Code::kFp8: return PackedCode<ByteWide<Fp8Byte>>(a);
    case Code::kInt8Groups: return PackedCode<Int8GroupWide>(a);
    case Code::kInt4: return PackedCode<NibbleWide<Int4Group>>(a);
    case Code::kMxfp4: return PackedCode<NibbleWide<Mxfp4Group>>(a);
    default: return WithBlockType(a.code, [&](auto type) { PackedCode<BlockWide<decltype(type)>>(a); });
  }
}
