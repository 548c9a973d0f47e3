// Matmuls of packed weights with activations in bytes, by tiles of AMX. Part of kernels_impl.h.
//
// Sums of whole numbers are exact, and what is done with them afterwards is as in impl_packed.h, so the
// bits are those of every other kernel.
//
// A tile of 16 outputs by 64 inputs is what a panel's lines are: no other layout is needed. Rows of x lie
// in tiles of up to 16, as `quantize_groups` leaves them, and those of kInt8 as kRowBlock says.

static_assert(kTiledRows == kTileHeight);

// Weights that stay in the second cache while all rows meet them.
constexpr int64_t kNearBytes = int64_t{512} << 10;

// ---- Bytes times bytes, one scale per row and output ----

constexpr int kSums = 0, kRows = 4, kWeights = 6;  // tiles: of each the first

// Of two tiles of rows, the second maybe without any, times two panels.
inline TileShapes ShapesOfFour(const int64_t (&counts)[2]) {
  TileShapes shapes;
  const int64_t second = counts[1] == 0 ? counts[0] : counts[1];
  for (int i = 0; i < 2; ++i) {
    shapes.Set(kSums + i, counts[0], 64);
    shapes.Set(kSums + 2 + i, second, 64);
    shapes.Set(kWeights + i, 16, 64);
  }
  shapes.Set(kRows, counts[0], 64);
  shapes.Set(kRows + 1, second, 64);
  return shapes;
}

// Two tiles of rows, or one, times two panels; of one, blocks of inputs take turns among its sums.
struct Int8Tiles {
  const PackedArgs& a;
  int64_t row, counts[2];  // the first row, and how many of each tile
  bool fetches;

  const uint8_t* Rows(int tile, int64_t block) const {
    const auto* x = static_cast<const uint8_t*>(a.x);
    const int64_t first = row + (tile == 0 ? 0 : counts[0]);
    return x + first * RowBytes(a.stride) + block * counts[tile] * kRowBlock;
  }

  // The sums of two panels, from where their lines begin.
  void Sum(const uint8_t* const (&panels)[2]) const {
    const int64_t blocks = a.stride / 64, rest = a.stride % 64 * kPanel;
    ZeroTile<kSums>();
    ZeroTile<kSums + 1>();
    ZeroTile<kSums + 2>();
    ZeroTile<kSums + 3>();
    for (int64_t block = 0; block < blocks; ++block) {
      const uint8_t* const lines[] = {panels[0] + block * 1024, panels[1] + block * 1024};
      const int64_t ahead = block * 1024 + 4096 < a.stride * kPanel ? 4096 : 4096 + a.stride * kPanel;
      for (int i = 0; fetches && i < 2; ++i) Prefetch(lines[i] + ahead, 16);
      Add(block, lines[0], lines[1]);
    }
    if (rest == 0) return;
    alignas(64) uint8_t lines[2][1024] = {};
    for (int i = 0; i < 2; ++i) std::memcpy(lines[i], panels[i] + blocks * 1024, static_cast<size_t>(rest));
    Add(blocks, lines[0], lines[1]);
  }

  void Add(int64_t block, const uint8_t* first, const uint8_t* second) const {
    LoadTile<kRows>(Rows(0, block), kRowBlock);
    LoadTile<kWeights>(first, 64);
    LoadTile<kWeights + 1>(second, 64);
    if (counts[1] != 0) {
      LoadTile<kRows + 1>(Rows(1, block), kRowBlock);
      AddUnsignedBytes<kSums, kRows, kWeights>();
      AddUnsignedBytes<kSums + 1, kRows, kWeights + 1>();
      AddUnsignedBytes<kSums + 2, kRows + 1, kWeights>();
      AddUnsignedBytes<kSums + 3, kRows + 1, kWeights + 1>();
    } else if (block % 2 == 0) {
      AddUnsignedBytes<kSums, kRows, kWeights>();
      AddUnsignedBytes<kSums + 1, kRows, kWeights + 1>();
    } else {
      AddUnsignedBytes<kSums + 2, kRows, kWeights>();
      AddUnsignedBytes<kSums + 3, kRows, kWeights + 1>();
    }
  }

  void Finish(int64_t panel, int64_t count) const {
    alignas(64) int32_t sums[2][2][kTileHeight][kPanel];
    StoreTile<kSums>(sums[0][0], 64);
    StoreTile<kSums + 1>(sums[0][1], 64);
    StoreTile<kSums + 2>(sums[1][0], 64);
    StoreTile<kSums + 3>(sums[1][1], 64);
    for (int64_t p = 0; p < count; ++p) {
      const int64_t n = (panel + p) * kPanel;
      const F16 w_scale = Load<F16>(static_cast<const float*>(a.w_scale) + n);
      const I16 offset = Load<I16>(a.w_sum + n) * kRowOffset;
      for (int64_t m = 0; m < counts[0] + counts[1]; ++m) {
        const bool second = m >= counts[0];
        I16 sum = Load<I16>(sums[second][p][second ? m - counts[0] : m]);
        if (counts[1] == 0) sum += Load<I16>(sums[1][p][m]);
        FinishPanel(a.out, row + m, panel + p, ToFloat(sum - offset) * (w_scale * a.x_scale[row + m]));
      }
    }
  }
};

void Int8ByTiles(const PackedArgs& a) {
  const int64_t panel_bytes = a.stride * kPanel;
  const int64_t near = std::max<int64_t>(2, kNearBytes / std::max<int64_t>(1, panel_bytes) / 2 * 2);
  for (int64_t begin = a.begin; begin < a.end; begin += near) {
    const int64_t end = std::min(a.end, begin + near);
    for (int64_t row = 0; row < a.rows; row += 2 * kTileHeight) {
      const int64_t left = a.rows - row, first = std::min(left, kTileHeight);
      const int64_t counts[2] = {first, std::min(left - first, kTileHeight)};
      const ConfiguredTiles configured(ShapesOfFour(counts));
      const Int8Tiles tiles{a, row, {counts[0], counts[1]}, row == 0};
      for (int64_t panel = begin; panel < end; panel += 2) {
        const uint8_t* from = a.w + panel * panel_bytes;
        const int64_t count = std::min<int64_t>(2, end - panel);
        tiles.Sum({from, count == 2 ? from + panel_bytes : from});
        tiles.Finish(panel, count);
      }
    }
  }
}

// ---- Codes with scales per group of 32 ----
//
// A code gives a group's weights of a panel as signed bytes in the eight lines of a tile, half of them for
// each of two parts with scales of their own.

struct Int8Codes {
  static constexpr bool kInPlace = true, kHasMinimum = false;
  static constexpr int64_t kParts = 1, kBytes = 512;
  static Factors<1> Of(const PackedArgs& a, int64_t panel, int64_t g) {
    return {{Int8Group::Scale(a.w_scale, panel * (a.stride / kGroup) + g)}, {F16{}}};
  }
  static void Unpack(const uint8_t*, uint8_t*) {}
};

// Codes of four bits by a table of what they are.
template <typename Group>
struct NibbleCodes {
  static constexpr bool kInPlace = false, kHasMinimum = false;
  static constexpr int64_t kParts = 1, kBytes = 256;
  static const uint8_t* Values();
  static Factors<1> Of(const PackedArgs& a, int64_t panel, int64_t g) {
    return {{Group::Scale(a.w_scale, panel * (a.stride / kGroup) + g)}, {F16{}}};
  }
  static void Unpack(const uint8_t* from, uint8_t* to) {
    for (int64_t line = 0; line < 4; ++line) {
      const U16 codes = Load<U16>(from + line * 64);
      Store(to + line * 64, LookUp(Values(), Int4Group::Unsigned(codes, 0)));
      Store(to + 256 + line * 64, LookUp(Values(), Int4Group::Unsigned(codes, 1)));
    }
  }
};

template <>
inline const uint8_t* NibbleCodes<Int4Group>::Values() {
  alignas(16) static constexpr int8_t kTable[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return reinterpret_cast<const uint8_t*>(kTable);
}

template <>
inline const uint8_t* NibbleCodes<Mxfp4Group>::Values() {  // doubled, as its scale is halved
  alignas(16) static constexpr int8_t kTable[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                    0, -1, -2, -3, -4, -6, -8, -12};
  return reinterpret_cast<const uint8_t*>(kTable);
}

template <typename Type>
struct BlockCodes {
  static constexpr bool kInPlace = false, kHasMinimum = Type::Scales::kHasMinimum;
  static constexpr int64_t kParts = Type::kParts, kBytes = Type::kBytes;
  static Factors<kParts> Of(const PackedArgs& a, int64_t panel, int64_t g) { return Type::Scales::Of(a, panel, g); }
  static void Unpack(const uint8_t* from, uint8_t* to) {
    constexpr uint32_t kOnes = 0x01010101u, kTop = 0x80808080u;
    constexpr auto kZero = static_cast<uint32_t>(Type::Codes::kZero);
    for (int64_t q = 0; q < 8; ++q) {  // code - kZero in each byte; codes below 128 leave nothing to borrow
      const U16 codes = As<U16>(Type::Codes::Unsigned(from, q));
      Store(to + q * 64, kZero == 128 ? codes ^ kTop : ((codes | kTop) - kZero * kOnes) ^ kTop);
    }
  }
};

constexpr int64_t kGroupLines = 512;  // bytes of a group's lines

// All groups of a panel as lines.
template <typename Codes>
void UnpackPanel(const uint8_t* from, int64_t groups, uint8_t* to) {
  for (int64_t g = 0; g < groups; ++g, from += Codes::kBytes, to += kGroupLines) {
    Prefetch(from + 4096, Codes::kBytes / 64);
    Codes::Unpack(from, to);
  }
}

// Parts that are summed one after the other, each by tiles of its own: what comes next need not wait.
constexpr int64_t kTurns = 4;
typedef int32_t PartSums[kTurns][kTileHeight][kPanel];

template <int kTurn>
ROOFLAX_INLINE void SumPart(const int8_t* x, int64_t row_bytes, const uint8_t* lines, PartSums& sums) {
  constexpr int kOwnRows = kRows + kTurn % 2, kOwnWeights = kWeights + kTurn % 2;
  LoadTile<kOwnRows>(x, row_bytes);
  LoadTile<kOwnWeights>(lines, 64);
  ZeroTile<kSums + kTurn>();
  AddSignedBytes<kSums + kTurn, kOwnRows, kOwnWeights>();
  StoreTile<kSums + kTurn>(sums[kTurn][0], 64);
}

// What a tile of rows is scaled by, sixteen numbers for each group, and for each part what is multiplied
// by its minimum.
struct RowFactors {
  const float* scale;  // [groups, 16]
  const float* sum;  // [groups * parts, 16]
};

// A tile of `count` rows, at most M, times a panel. Of two planes the high bytes' sums come before the low ones'.
template <int64_t M, typename Codes, int64_t kPlanes>
void GroupsOfTile(const PackedArgs& a, int64_t row, int64_t count, RowFactors rows, int64_t panel,
                  const uint8_t* lines) {
  constexpr int64_t kParts = Codes::kParts, kPartBytes = kGroup / kParts, kPartLines = kGroupLines / kParts;
  constexpr int64_t kOwn = kParts * kPlanes;  // sums of a group
  static_assert(kTurns % kOwn == 0);
  const int64_t parts = a.stride / kGroup * kOwn;
  const auto* x = static_cast<const int8_t*>(a.x) + row * a.stride * kPlanes;
  F16 totals[M];
  _Pragma("GCC unroll 16")
  for (int64_t m = 0; m < M; ++m) totals[m] = F16{};
  alignas(64) PartSums sums[2];  // those that are scaled, and those that are summed meanwhile
  const auto sum = [&](int64_t part, PartSums& to) {
    const auto at = [&](int64_t turn) {
      const int64_t own = part + turn, high = kPlanes - 1 - own % kPlanes;
      return x + (own / kOwn * count * kPlanes + high) * kGroup + own / kPlanes % kParts * kPartBytes;
    };
    const auto from = [&](int64_t turn) { return lines + (part + turn) / kPlanes * kPartLines; };
    constexpr int64_t kRow = kPlanes * kGroup;
    if (part < parts) SumPart<0>(at(0), kRow, from(0), to);
    if (part + 1 < parts) SumPart<1>(at(1), kRow, from(1), to);
    if (part + 2 < parts) SumPart<2>(at(2), kRow, from(2), to);
    if (part + 3 < parts) SumPart<3>(at(3), kRow, from(3), to);
  };
  if (count < M) std::memset(sums, 0, sizeof(sums));
  sum(0, sums[0]);
  for (int64_t first = 0; first < parts; first += kTurns) {
    const auto& of = sums[first / kTurns % 2];
    sum(first + kTurns, sums[(first / kTurns + 1) % 2]);
    for (int64_t part = first; part < std::min(parts, first + kTurns); part += kOwn) {
      const int64_t g = part / kOwn;
      const Factors<kParts> factors = Codes::Of(a, panel, g);
      for (int64_t i = 0; i < kParts; ++i) {
        _Pragma("GCC unroll 16")
        for (int64_t m = 0; m < M; ++m) {
          const auto* own = of + part - first + i * kPlanes;
          I16 whole = Load<I16>(own[0][m]);
          if constexpr (kPlanes == 2) whole = (whole << 8) + Load<I16>(own[1][m]);
          totals[m] += ToFloat(whole) * (factors.scale[i] * rows.scale[g * kTileHeight + m]);
          if constexpr (Codes::kHasMinimum) {
            totals[m] -= factors.minimum[i] * rows.sum[(g * kParts + i) * kTileHeight + m];
          }
        }
      }
    }
  }
  F16 done[M];  // in memory, which `totals` is not
  _Pragma("GCC unroll 16")
  for (int64_t m = 0; m < M; ++m) done[m] = totals[m];
  for (int64_t m = 0; m < count; ++m) FinishPanel(a.out, row + m, panel, done[m]);
}

// Numbers of each tile of rows, as [groups, parts, rows of the tile], spread to sixteen rows.
template <typename Number>
void Spread(const PackedArgs& a, int64_t parts, const Number& of, std::vector<float>& to) {
  const int64_t each = a.stride / kGroup * parts, tiles = (a.rows + kTileHeight - 1) / kTileHeight;
  to.assign(static_cast<size_t>(tiles * each * kTileHeight), 0.0f);
  for (int64_t row = 0; row < a.rows; row += kTileHeight) {
    const int64_t count = std::min(kTileHeight, a.rows - row);
    float* out = to.data() + row * each;
    for (int64_t i = 0; i < each; ++i) {
      for (int64_t m = 0; m < count; ++m) out[i * kTileHeight + m] = of(row, count, i, m);
    }
  }
}

inline TileShapes GroupShapes(int64_t rows, int64_t parts) {
  TileShapes shapes;
  for (int i = 0; i < kTurns; ++i) shapes.Set(kSums + i, rows, 64);
  for (int i = 0; i < 2; ++i) {
    shapes.Set(kRows + i, rows, kGroup / parts);
    shapes.Set(kWeights + i, kGroup / 4 / parts, 64);
  }
  return shapes;
}

template <typename Codes>
void GroupsByTiles(const PackedArgs& a) {
  static thread_local std::vector<float> scales, sums;
  static thread_local Lines unpacked;
  constexpr int64_t kParts = Codes::kParts;
  const int64_t groups = a.stride / kGroup, panel_bytes = groups * Codes::kBytes;
  Spread(a, 1, [&](int64_t row, int64_t count, int64_t g, int64_t m) {
    return a.x_scale[row * groups + g * count + m];
  }, scales);
  if constexpr (Codes::kHasMinimum) {
    Spread(a, kParts, [&](int64_t row, int64_t count, int64_t part, int64_t m) {
      return FloatAt(a.x_start + row * groups * kParts + part * count + m);
    }, sums);
  }
  const int64_t near = std::max<int64_t>(1, kNearBytes / std::max<int64_t>(1, groups * kGroupLines));
  auto* lines = reinterpret_cast<uint8_t*>(
      Codes::kInPlace ? nullptr : unpacked.Of(near * groups * kGroupLines / 4));
  for (int64_t begin = a.begin; begin < a.end; begin += near) {
    const int64_t end = std::min(a.end, begin + near);
    if constexpr (!Codes::kInPlace) {
      for (int64_t panel = begin; panel < end; ++panel) {
        UnpackPanel<Codes>(a.w + panel * panel_bytes, groups,
                           lines + (panel - begin) * groups * kGroupLines);
      }
    }
    const uint8_t* from = Codes::kInPlace ? a.w + begin * panel_bytes : lines;
    for (int64_t row = 0; row < a.rows; row += kTileHeight) {
      const int64_t count = std::min(kTileHeight, a.rows - row);
      const ConfiguredTiles configured(GroupShapes(count, kParts));
      for (int64_t panel = begin; panel < end; ++panel) {
        const uint8_t* own = from + (panel - begin) * groups * kGroupLines;
        const RowFactors factors{scales.data() + row * groups,
                                 Codes::kHasMinimum ? sums.data() + row * groups * kParts : nullptr};
        a.planes == 2 ? GroupsOfTile<16, Codes, 2>(a, row, count, factors, panel, own)
                      : GroupsOfTile<16, Codes, 1>(a, row, count, factors, panel, own);
      }
    }
  }
}

void BytesByTiles(const PackedArgs& a) {
  if (a.rows * a.planes < (a.code == Code::kInt8 ? kInt8From : kGroupsFrom)) return avx512::kKernels.bytes(a);
  switch (a.code) {
    case Code::kInt8: return Int8ByTiles(a);
    case Code::kFp8: return;
    case Code::kInt8Groups: return GroupsByTiles<Int8Codes>(a);
    case Code::kInt4: return GroupsByTiles<NibbleCodes<Int4Group>>(a);
    case Code::kMxfp4: return GroupsByTiles<NibbleCodes<Mxfp4Group>>(a);
    default: return WithBlockType(a.code, [&](auto type) { GroupsByTiles<BlockCodes<decltype(type)>>(a); });
  }
}
