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
  return As<F16>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(LowHalves(As<U16>(words)))));
#elif defined(__aarch64__)
  F16 out;
  ROOFLAX_EACH out.at[i] = vcvt_f32_f16((float16x4_t)vmovn_u32((uint32x4_t)words.at[i]));
  return out;
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
    return LookUp(kIq4Values, As<I16>(QuadOf<4>(lines, q)));
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
  static_assert(Codes::kZero == 0 || !Scales::kHasMinimum);  // x_start is for one of them
};
using Q4_1 = BlockType<Linear<4, 0>, PairScales>;
using Q5_0 = BlockType<Linear<5, 16>, HalfScales>;
using Q5_1 = BlockType<Linear<5, 0>, PairScales>;
using Q2K = BlockType<Linear<2, 0>, SuperOfNibbles>;
using Q3K = BlockType<Linear<3, 4>, SuperOfParts<2>>;
using Q4K = BlockType<Linear<4, 0>, SuperWithMinimum>;
using Q5K = BlockType<Linear<5, 0>, SuperWithMinimum>;
using Q6K = BlockType<Linear<6, 32>, SuperOfParts<2>>;
using Int6 = BlockType<Linear<6, 32>, HalfScales>;
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
    case Code::kInt6: return use(Int6{});
    case Code::kIq4Nl: return use(Iq4Nl{});
    case Code::kIq4Xs: return use(Iq4Xs{});
    default: return;
  }
}

#if !defined(__aarch64__)
// The products of a part of a group with a row, whole numbers, of codes as unsigned bytes; where a sum of
// unsigned bytes does not fit, of signed ones, which nothing is to be taken from.
template <typename Type>
struct PartOfGroup {
  using Codes = typename Type::Codes;
  static constexpr int64_t kQuads = Type::kQuads, kPartBytes = kQuads * 4, kRowBytes = kGroup;
#if defined(ROOFLAX_PAIRS_OF_BYTES)
  static constexpr bool kSigned = !Codes::kFitsTwice;
#else
  static constexpr bool kSigned = false;
#endif
  I16 codes[kQuads];

  ROOFLAX_INLINE PartOfGroup(const uint8_t* w, int64_t part) {
    ROOFLAX_WHOLE
    for (int64_t q = 0; q < kQuads; ++q) {
      codes[q] = Codes::Unsigned(w, part * kQuads + q);
      if constexpr (kSigned) codes[q] = As<I16>(As<U16>(codes[q]) ^ 0x80808080u);
    }
  }

  // x: of this part; start: StartTimes times its sum, where codes are too large.
  ROOFLAX_INLINE I16 Dot(const int8_t* x, int32_t start) const {
    I16 sum = Codes::kZero != 0 && !kSigned ? I16{} + start : I16{};
#if defined(ROOFLAX_PAIRS_OF_BYTES)
    if constexpr (kSigned) {
      ROOFLAX_WHOLE
      for (int64_t q = 0; q < kQuads; ++q) sum = DotRow(sum, BroadcastBytes(x + q * 4), codes[q]);
      return sum;
    }
    constexpr int64_t kTogether = Codes::kBits == 6 ? 2 : 4;  // whose products add up in 16 bits
    ROOFLAX_WHOLE
    for (int64_t quad = 0; quad < kQuads; quad += kTogether) {
      I16 pairs{};
      ROOFLAX_WHOLE
      for (int64_t q = quad; q < quad + kTogether; ++q) {
        pairs = AddPairs(pairs, codes[q], BroadcastBytes(x + q * 4));
      }
      sum = AddBoth(sum, pairs);
    }
#else
    ROOFLAX_WHOLE
    for (int64_t q = 0; q < kQuads; ++q) sum = Dot4(sum, codes[q], BroadcastBytes(x + q * 4));
#endif
    return sum;
  }
};

// The same with a row of two planes.
template <typename Type>
struct PlanesOfGroup {
  using Codes = typename Type::Codes;
  static constexpr int64_t kQuads = Type::kQuads;
#if defined(ROOFLAX_PAIRS_OF_BYTES)
  static constexpr int64_t kPartBytes = kQuads * 8, kRowBytes = 2 * kGroup;
  Words words[kQuads];

  ROOFLAX_INLINE PlanesOfGroup(const uint8_t* w, int64_t part) {
    constexpr bool kSigned = Codes::kZero == 128;
    ROOFLAX_WHOLE
    for (int64_t q = 0; q < kQuads; ++q) {
      const auto codes = As<U16>(Codes::Unsigned(w, part * kQuads + q));
      words[q] = Words::Of<kSigned>(As<I16>(kSigned ? codes ^ 0x80808080u : codes));
    }
  }

  ROOFLAX_INLINE I16 Dot(const int8_t* x, int32_t start) const {
    I16 sum = Codes::kZero != 0 && Codes::kZero != 128 ? I16{} + start : I16{};
    ROOFLAX_WHOLE
    for (int64_t q = 0; q < kQuads; ++q) sum = DotWords(sum, words[q], x + q * 8);
    return sum;
  }
#else
  static constexpr int64_t kPartBytes = kQuads * 4, kRowBytes = 2 * kGroup;
  PartOfGroup<Type> weights;

  ROOFLAX_INLINE PlanesOfGroup(const uint8_t* w, int64_t part) : weights(w, part) {}
  ROOFLAX_INLINE I16 Dot(const int8_t* x, int32_t start) const {
    return (weights.Dot(x + kGroup, 0) << 8) + weights.Dot(x, start);
  }
#endif
};

// Rows of a tile, and what they are scaled by, from a group on.
struct GroupRows {
  const int8_t* x;
  const float* scale;
  const int32_t* start;  // with minimums of float32
};

// Adds a group's products with rows to their totals, by the parts of a group of either kind.
template <typename Type, typename Part>
ROOFLAX_INLINE void AddGroupOf(const PackedArgs& a, const uint8_t* w, int64_t panel, int64_t g, GroupRows rows,
                             int64_t count, F16* totals) {
  constexpr int64_t kParts = Type::kParts;
  const Factors<kParts> factors = Type::Scales::Of(a, panel, g);
  ROOFLAX_WHOLE
  for (int64_t part = 0; part < kParts; ++part) {
    const Part weights(w, part);
    for (int64_t m = 0; m < count; ++m) {
      const float own = rows.scale[m];
      const int32_t* start = rows.start + part * count + m;
      const I16 sum = weights.Dot(rows.x + m * Part::kRowBytes + part * Part::kPartBytes, *start);
      F16 total = totals[m] + ToFloat(sum) * (factors.scale[part] * own);
      if constexpr (Type::Scales::kHasMinimum) total -= factors.minimum[part] * FloatAt(start);
      totals[m] = total;
    }
  }
}

#if defined(ROOFLAX_PAIRS_OF_BYTES)
// The same of M rows whose products are of signed bytes: what a code is made into serves all of them, and their
// sums stay in registers.
template <typename Type, int64_t M>
ROOFLAX_INLINE void AddSigned(const PackedArgs& a, const uint8_t* w, int64_t panel, int64_t g, GroupRows rows,
                              F16* totals) {
  static_assert(Type::kParts == 1 && !Type::Scales::kHasMinimum);
  I16 sums[M];
  ROOFLAX_WHOLE
  for (auto& sum : sums) sum = I16{};
  ROOFLAX_WHOLE
  for (int64_t q = 0; q < Type::kQuads; ++q) {
    const auto codes = As<I16>(As<U16>(Type::Codes::Unsigned(w, q)) ^ 0x80808080u);
    ROOFLAX_WHOLE
    for (int64_t m = 0; m < M; ++m) {
      sums[m] = DotRow(sums[m], BroadcastBytes(rows.x + m * kGroup + q * 4), codes);
      KeepInRegister(sums[m]);
    }
  }
  const Factors<1> factors = Type::Scales::Of(a, panel, g);
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) totals[m] += ToFloat(sums[m]) * (factors.scale[0] * rows.scale[m]);
}

template <typename Type, int64_t M = kTileRows>
ROOFLAX_INLINE void AddSignedUpTo(const PackedArgs& a, const uint8_t* w, int64_t panel, int64_t g, GroupRows rows,
                                  int64_t count, F16* totals) {
  if constexpr (M > 1) {
    if (count < M) return AddSignedUpTo<Type, M - 1>(a, w, panel, g, rows, count, totals);
  }
  AddSigned<Type, M>(a, w, panel, g, rows, totals);
}
#endif

template <typename Type>
ROOFLAX_INLINE void AddGroup(const PackedArgs& a, const uint8_t* w, int64_t panel, int64_t g, GroupRows rows,
                             int64_t count, F16* totals) {
  if (a.planes == 2) return AddGroupOf<Type, PlanesOfGroup<Type>>(a, w, panel, g, rows, count, totals);
#if defined(ROOFLAX_PAIRS_OF_BYTES)
  if constexpr (PartOfGroup<Type>::kSigned) return AddSignedUpTo<Type>(a, w, panel, g, rows, count, totals);
#endif
  AddGroupOf<Type, PartOfGroup<Type>>(a, w, panel, g, rows, count, totals);
}

// One row times P panels, which are read at once.
template <typename Type, int64_t P>
void RowOfBlocks(const PackedArgs& a, int64_t panel, int64_t apart) {
  const int64_t groups = a.stride / kGroup, panel_bytes = groups * Type::kBytes;
  const int64_t ahead = kCodesApart ? kStreamAhead : 4096;
  F16 totals[P];
  ROOFLAX_WHOLE
  for (auto& total : totals) total = F16{};
  for (int64_t g = 0; g < groups; ++g) {
    const auto* x = static_cast<const int8_t*>(a.x) + g * kGroup * a.planes;
    const GroupRows rows{x, a.x_scale + g, a.x_start + g * Type::kParts};
    ROOFLAX_WHOLE
    for (int64_t p = 0; p < P; ++p) {
      const uint8_t* w = a.w + (panel + p * apart) * panel_bytes + g * Type::kBytes;
      Prefetch(w + ahead, Type::Codes::kBits);
      AddGroup<Type>(a, w, panel + p * apart, g, rows, 1, totals + p);
    }
  }
  ROOFLAX_WHOLE
  for (int64_t p = 0; p < P; ++p) FinishPanel(a.out, 0, panel + p * apart, totals[p]);
}

// A tile of rows times a panel.
template <typename Type>
void TileOfBlocks(const PackedArgs& a, int64_t row, int64_t count, int64_t panel, bool fetches) {
  const int64_t groups = a.stride / kGroup;
  const uint8_t* w = a.w + panel * groups * Type::kBytes;
  const auto* x = static_cast<const int8_t*>(a.x) + row * a.stride * a.planes;
  const float* scale = a.x_scale + row * groups;
  const int32_t* start = a.x_start + row * groups * Type::kParts;
  F16 totals[kTileRows] = {};
  for (int64_t g = 0; g < groups; ++g, w += Type::kBytes) {
    if (fetches) Prefetch(w + 4096, Type::Codes::kBits);
    const int64_t first = g * count;
    const GroupRows rows{x + first * kGroup * a.planes, scale + first, start + first * Type::kParts};
    AddGroup<Type>(a, w, panel, g, rows, count, totals);
  }
  for (int64_t m = 0; m < count; ++m) FinishPanel(a.out, row + m, panel, totals[m]);
}

// Any number of rows: a few panels stay in the cache while all rows meet them.
template <typename Type>
void BlocksTimesBytes(const PackedArgs& a) {
  if (a.rows == 1) {
    constexpr int64_t kAtOnce = kCodeStreams;
    const int64_t turns = (a.end - a.begin) / kAtOnce;
    for (int64_t turn = 0; turn < turns; ++turn) {
      RowOfBlocks<Type, kAtOnce>(a, a.begin + turn, turns);
    }
    for (int64_t panel = a.begin + turns * kAtOnce; panel < a.end; ++panel) RowOfBlocks<Type, 1>(a, panel, 1);
    return;
  }
  constexpr int64_t kPanels = 2;
  for (int64_t begin = a.begin; begin < a.end; begin += kPanels) {
    for (int64_t row = 0, count; row < a.rows; row += count) {
      count = TileRows(a.rows - row, kTileRows);
      for (int64_t panel = begin; panel < std::min(begin + kPanels, a.end); ++panel) {
        TileOfBlocks<Type>(a, row, count, panel, row == 0);
      }
    }
  }
}
#endif
