// Matmuls of bytes for aarch64. Part of kernels_impl.h.
//
// Codes in groups meet a tile of rows four outputs at a time: their quads, and the totals of all rows, stay in
// registers. Products are rounded apart from sums only where that is written, so that all tiles round alike.

// sums += products of each lane's bytes with the four bytes of x in one lane.
template <int kLane>
ROOFLAX_INLINE int32x4_t DotLane(int32x4_t sums, int8x16_t codes, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_laneq_s32(sums, codes, x, kLane);
#else
  return DotPiece(sums, codes, (int8x16_t)vdupq_laneq_s32((int32x4_t)x, kLane));
#endif
}

// N numbers of 32 bits, the rest zeros.
template <int64_t N, typename V>
ROOFLAX_INLINE V LoadFew(const void* from) {
  V some{};
  std::memcpy(&some, from, N * 4);
  return some;
}

// Codes with a scale per group, as a block type.
template <typename Group, Code kCode>
struct AsBlocks {
  struct Codes {
    static constexpr int64_t kZero = -StartTimes(kCode);
    ROOFLAX_INLINE static I16 Unsigned(const uint8_t* lines, int64_t q) {
      return Group::Unsigned(Load<U16>(lines + q % Group::kLines * 64), q / Group::kLines);
    }
  };
  struct Scales {
    static constexpr bool kHasMinimum = false;
    ROOFLAX_INLINE static Factors<1> Of(const PackedArgs& a, int64_t panel, int64_t g) {
      return {{Group::Scale(a.w_scale, panel * (a.stride / kGroup) + g)}, {F16{}}};
    }
  };
  static constexpr int64_t kBytes = Group::kLines * 64, kParts = 1, kQuads = 8;
};

// sum += the products of a part of a group with a row.
template <int64_t kQuads>
ROOFLAX_INLINE int32x4_t DotQuads(int32x4_t sum, const int8x16_t* codes, const int8_t* x) {
  ROOFLAX_WHOLE
  for (int64_t q = 0; q < kQuads; q += 4) {
    const int8x16_t quads = vld1q_s8(x + q * 4);
    sum = DotLane<0>(sum, codes[q], quads);
    sum = DotLane<1>(sum, codes[q + 1], quads);
    sum = DotLane<2>(sum, codes[q + 2], quads);
    sum = DotLane<3>(sum, codes[q + 3], quads);
  }
  return sum;
}

// What a part of a group adds to the totals of row m and of those before it, for four outputs.
template <typename Type, int64_t kPlanes, int64_t M, int64_t m = M - 1>
ROOFLAX_INLINE void AddPart(const int8x16_t* codes, const int8_t* x, int32x4_t starts, float32x4_t x_scales,
                            float32x4_t scale, float32x4_t minimum, int i, F16* totals) {
  constexpr bool kStarts = Type::Codes::kZero != 0 && Type::Codes::kZero != 128;
  if constexpr (m > 0) {
    AddPart<Type, kPlanes, M, m - 1>(codes, x, starts, x_scales, scale, minimum, i, totals);
  }
  const int8_t* row = x + m * kPlanes * kGroup;
  int32x4_t sum = kStarts ? vdupq_laneq_s32(starts, static_cast<int>(m)) : int32x4_t{};
  if constexpr (kPlanes == 2) sum += vshlq_n_s32(DotQuads<Type::kQuads>(int32x4_t{}, codes, row + kGroup), 8);
  sum = DotQuads<Type::kQuads>(sum, codes, row);
  float32x4_t total = totals[m].at[i];
  total = vfmaq_f32(total, vcvtq_f32_s32(sum), vmulq_laneq_f32(scale, x_scales, static_cast<int>(m)));
  if constexpr (Type::Scales::kHasMinimum) {
    total = vfmsq_laneq_f32(total, minimum, vreinterpretq_f32_s32(starts), static_cast<int>(m));
  }
  totals[m].at[i] = total;
}

// A tile of M rows times a panel.
template <typename Type, int64_t kPlanes, int64_t M>
void TileOfGroups(const PackedArgs& args, int64_t row, int64_t panel) {
  const PackedArgs a = args;  // in registers
  constexpr int64_t kParts = Type::kParts, kQuads = Type::kQuads;
  const int64_t groups = a.stride / kGroup;
  const uint8_t* w = a.w + panel * groups * Type::kBytes;
  const auto* x = static_cast<const int8_t*>(a.x) + row * a.stride * kPlanes;
  const float* x_scale = a.x_scale + row * groups;
  const int32_t* x_start = a.x_start + row * groups * kParts;
  F16 totals[M];
  ROOFLAX_WHOLE
  for (auto& total : totals) total = F16{};
  for (int64_t g = 0; g < groups; ++g) {
    Prefetch(w + 4096, Type::kBytes / 64);
    const auto x_scales = LoadFew<M, float32x4_t>(x_scale);
    ROOFLAX_WHOLE
    for (int64_t part = 0; part < kParts; ++part) {
      const auto starts = LoadFew<M, int32x4_t>(x_start + part * M);
      ROOFLAX_EACH {  // what is made of the other pieces here is never computed
        const auto factors = Type::Scales::Of(a, panel, g);
        int8x16_t codes[kQuads];
        ROOFLAX_WHOLE
        for (int64_t q = 0; q < kQuads; ++q) {
          auto quad = As<U16>(Type::Codes::Unsigned(w, part * kQuads + q));
          if constexpr (Type::Codes::kZero == 128) quad = quad ^ 0x80808080u;  // signed, as they are
          codes[q] = (int8x16_t)quad.at[i];
        }
        AddPart<Type, kPlanes, M>(codes, x + part * kQuads * 4, starts, x_scales,
                                  factors.scale[part].at[i], factors.minimum[part].at[i], i, totals);
        // Nothing of the next piece is begun before, as there are no registers for it.
        asm volatile("" : "+r"(w), "+w"(totals[M - 1].at[i]) : : "memory");
      }
    }
    w += Type::kBytes;
    x += M * kPlanes * kGroup;
    x_scale += M;
    x_start += M * kParts;
  }
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) FinishPanel(args.out, row + m, panel, totals[m]);
}

template <typename Type, int64_t kPlanes, int64_t M = kTileRows>
void TileOfGroups(const PackedArgs& a, int64_t row, int64_t count, int64_t panel) {
  if constexpr (M > 1) {
    if (count < M) return TileOfGroups<Type, kPlanes, M - 1>(a, row, count, panel);
  }
  TileOfGroups<Type, kPlanes, M>(a, row, panel);
}

// Any number of rows: a panel stays in the cache while all of them meet it.
template <typename Type>
void GroupsTimesBytes(const PackedArgs& a) {
  for (int64_t panel = a.begin; panel < a.end; ++panel) {
    for (int64_t row = 0; row < a.rows; row += kTileRows) {
      const int64_t count = std::min(kTileRows, a.rows - row);
      a.planes == 2 ? TileOfGroups<Type, 2>(a, row, count, panel) : TileOfGroups<Type, 1>(a, row, count, panel);
    }
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// ---- Bytes times bytes by matrices of two rows ----

// Sixteen inputs of P pairs of rows, and of eight outputs of a panel. sums[p][i] are of the pair's first row with
// outputs 2 i and 2 i + 1, then of its second.
template <int64_t P>
ROOFLAX_INLINE void AddPairs(const int8_t* const* x, int64_t at, const uint8_t* w, int32x4_t (&sums)[P][4]) {
  int8x16_t inputs[P][2];
  ROOFLAX_WHOLE
  for (int64_t p = 0; p < P; ++p) {
    const auto one = (int64x2_t)vld1q_s8(x[2 * p] + at), two = (int64x2_t)vld1q_s8(x[2 * p + 1] + at);
    inputs[p][0] = (int8x16_t)vzip1q_s64(one, two);
    inputs[p][1] = (int8x16_t)vzip2q_s64(one, two);
  }
  ROOFLAX_WHOLE
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t octet = i / 2, piece = i % 2;
    const uint8_t* from = w + octet * 128 + piece * 16;
    const auto one = (int32x4_t)vld1q_u8(from), two = (int32x4_t)vld1q_u8(from + 64);
    const auto low = (int8x16_t)vzip1q_s32(one, two), high = (int8x16_t)vzip2q_s32(one, two);
    ROOFLAX_WHOLE
    for (int64_t p = 0; p < P; ++p) {
      sums[p][2 * piece] = vmmlaq_s32(sums[p][2 * piece], inputs[p][octet], low);
      sums[p][2 * piece + 1] = vmmlaq_s32(sums[p][2 * piece + 1], inputs[p][octet], high);
    }
  }
}

// At most P pairs of rows times a panel, half of it at a time; where a pair lacks a row, the last is taken twice.
template <int64_t P>
void TileOfPairs(const PackedArgs& a, int64_t row, int64_t count, int64_t panel) {
  if constexpr (P > 1) {
    if (count <= 2 * P - 2) return TileOfPairs<P - 1>(a, row, count, panel);
  }
  const int8_t* x[2 * P];
  for (int64_t m = 0; m < 2 * P; ++m) {
    x[m] = static_cast<const int8_t*>(a.x) + (row + std::min(m, count - 1)) * a.stride;
  }
  const int64_t whole = a.stride / 16 * 16, rest = a.stride - whole;
  const uint8_t* w = a.w + panel * a.stride * kPanel;
  alignas(16) uint8_t last_w[256] = {};
  alignas(16) int8_t last_x[2 * P][16] = {};
  const int8_t* last[2 * P];
  for (int64_t m = 0; m < 2 * P; ++m) {
    last[m] = last_x[m];
    std::memcpy(last_x[m], x[m] + whole, static_cast<size_t>(rest));
  }
  std::memcpy(last_w, w + whole * kPanel, static_cast<size_t>(rest * kPanel));
  I16 found[2 * P];
  for (int64_t half = 0; half < 2; ++half) {
    int32x4_t sums[P][4];
    ROOFLAX_WHOLE
    for (auto& line : sums) {
      ROOFLAX_WHOLE
      for (auto& sum : line) sum = int32x4_t{};
    }
    const uint8_t* from = w + half * 32;
    for (int64_t k = 0; k < whole; k += 16) {
      Prefetch(from + k * kPanel + 4096, 4);
      AddPairs<P>(x, k, from + k * kPanel, sums);
    }
    if (rest > 0) AddPairs<P>(last, 0, last_w + half * 32, sums);
    ROOFLAX_WHOLE
    for (int64_t p = 0; p < P; ++p) {
      ROOFLAX_WHOLE
      for (int64_t i = 0; i < 2; ++i) {
        const auto one = (int64x2_t)sums[p][2 * i], two = (int64x2_t)sums[p][2 * i + 1];
        found[2 * p].at[half * 2 + i] = (int32x4_t)vzip1q_s64(one, two);
        found[2 * p + 1].at[half * 2 + i] = (int32x4_t)vzip2q_s64(one, two);
      }
    }
  }
  const F16 w_scale = Load<F16>(static_cast<const float*>(a.w_scale) + panel * kPanel);
  for (int64_t m = 0; m < count; ++m) {
    FinishPanel(a.out, row + m, panel, ToFloat(found[m]) * (w_scale * a.x_scale[row + m]));
  }
}
#endif

// Bytes with one scale per row.
void RowsTimesBytes(const PackedArgs& a) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  constexpr int64_t kMostPairs = 4;
  if (a.rows > 1) {
    for (int64_t panel = a.begin; panel < a.end; ++panel) {
      for (int64_t row = 0; row < a.rows; row += 2 * kMostPairs) {
        TileOfPairs<kMostPairs>(a, row, std::min(2 * kMostPairs, a.rows - row), panel);
      }
    }
    return;
  }
#endif
  AllRows<Int8Tile>(a);
}
