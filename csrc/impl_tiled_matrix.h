// Matmuls with bfloat16 as it is, by tiles of AMX. Part of kernels_impl.h.
//
// A row of float32 is the sum of three rows of bfloat16 (of one, where it was bfloat16): x * w is the sum
// of exact products, added up in float32. The order does not depend on the number of rows: block of 32
// inputs after block, of a block term after term, of those the tile instruction's own.

static_assert(kTiledRows == kTileHeight);

// ---- Panels of pairs ----

// Bytes that few rows fetch ahead, and many; and lines of a block.
constexpr int64_t kPairsAhead = 1024, kManyAhead = 2048, kPairLines = kTermBlock / 2;

// Up to a tile of rows times two panels at once, which stream past it.
template <int kTerms>
struct FewRowsOfPairs {
  static constexpr int kTerm = 2, kWeights = 2 + kTerms;  // tiles: two of sums, the terms, and of w
  const MatmulArgs& a;

  TileShapes Shapes() const {
    TileShapes shapes;
    for (int i = 0; i < kWeights; ++i) shapes.Set(i, a.rows, 64);
    shapes.Set(kWeights, kPairLines, 64);
    return shapes;
  }

  template <int kSum>
  void Add(const uint8_t* lines) const {
    Prefetch(lines + kPairsAhead, kPairLines);
    LoadTile<kWeights>(lines, 64);
    AddBfloat16<kSum, kTerm, kWeights>();
    if constexpr (kTerms == 3) {
      AddBfloat16<kSum, kTerm + 1, kWeights>();
      AddBfloat16<kSum, kTerm + 2, kWeights>();
    }
  }

  void Run(int64_t panel, int64_t count) const {
    const int64_t blocks = NumTermBlocks(a.inner), panel_bytes = blocks * kPairBlockBytes;
    const auto* first = static_cast<const uint8_t*>(a.w) + panel * panel_bytes;
    const uint8_t* second = count == 2 ? first + panel_bytes : first;
    const uint16_t* x = a.terms;
    ZeroTile<0>();
    ZeroTile<1>();
    for (int64_t at = 0; at < panel_bytes; at += kPairBlockBytes, x += kTerms * a.rows * kTermBlock) {
      LoadTile<kTerm>(x, 64);
      if constexpr (kTerms == 3) {
        LoadTile<kTerm + 1>(x + a.rows * kTermBlock, 64);
        LoadTile<kTerm + 2>(x + 2 * a.rows * kTermBlock, 64);
      }
      Add<0>(first + at);
      Add<1>(second + at);
    }
    alignas(64) float sums[2][kTileHeight][kPanel];
    StoreTile<0>(sums[0][0], 64);
    StoreTile<1>(sums[1][0], 64);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t m = 0; m < a.rows; ++m) FinishPanel(a.out, m, panel + i, Load<F16>(sums[i][m]));
    }
  }
};

// Panels, and blocks of them, that stay in the second cache while up to so many rows meet them; and blocks
// of two tiles of rows that stay in the first while all those panels do.
constexpr int64_t kNearPanels = 16, kStretch = 32, kRowsTogether = 512;
template <int kTerms>
constexpr int64_t kNearBlocks = kTerms == 1 ? 14 : 7;
constexpr int64_t kTileFloats = kTileHeight * kPanel, kFourTiles = 4 * kTileFloats;

// Two tiles of rows (the second maybe absent) times panels two by two.
template <int kTerms>
struct ManyRowsOfPairs {
  const MatmulArgs& a;
  int64_t row, counts[2];
  float* sums;  // [pairs of panels, 2 tiles, 2 panels, 16, 16]

  // Asks for the lines of some rows of y, from panel `panel` on, before they are written.
  void PrefetchOutput(int64_t panel, int64_t begin, int64_t count) const {
    const int64_t width = a.out.halves ? 2 : 4, bytes = a.out.outer * width;
    const char* to = static_cast<const char*>(a.out.y) + row * bytes + panel * kPanel * width;
    for (int64_t m = begin; m < std::min(begin + count, counts[0] + counts[1]); ++m) {
      __builtin_prefetch(to + m * bytes, 1);
      if (!a.out.halves) __builtin_prefetch(to + m * bytes + 64, 1);
    }
  }

  // Blocks [block, end) of two panels, of which the first is the number `panel`.
  void Add(const uint8_t* first, const uint8_t* second, int64_t panel, int64_t block, int64_t end, float* own) const {
    const int64_t blocks = NumTermBlocks(a.inner), to_come = end == blocks ? 2 * kTileHeight / (end - block) + 1 : 0;
    if (block == 0) {
      ZeroTile<kSums>();
      ZeroTile<kSums + 1>();
      ZeroTile<kSums + 2>();
      ZeroTile<kSums + 3>();
    } else {
      LoadTile<kSums>(own, 64);
      LoadTile<kSums + 1>(own + kTileFloats, 64);
      LoadTile<kSums + 2>(own + 2 * kTileFloats, 64);
      LoadTile<kSums + 3>(own + 3 * kTileFloats, 64);
    }
    const uint16_t* x = TermsAt(a, row, counts[0], block);
    const uint16_t* y = TermsAt(a, row + counts[0], counts[1], block);
    for (int64_t i = block; i < end; ++i) {
      if (row == 0) {
        Prefetch(first + i * kPairBlockBytes + kManyAhead, kPairLines);
        Prefetch(second + i * kPairBlockBytes + kManyAhead, kPairLines);
      }
      PrefetchOutput(panel, (i - block) * to_come, to_come);
      LoadPassingTile<kWeights>(first + i * kPairBlockBytes, 64);
      LoadPassingTile<kWeights + 1>(second + i * kPairBlockBytes, 64);
      for (int term = 0; term < kTerms; ++term, x += counts[0] * kTermBlock, y += counts[1] * kTermBlock) {
        LoadTile<kRows>(x, 64);
        AddBfloat16<kSums, kRows, kWeights>();
        AddBfloat16<kSums + 1, kRows, kWeights + 1>();
        if (counts[1] == 0) continue;
        LoadTile<kRows + 1>(y, 64);
        AddBfloat16<kSums + 2, kRows + 1, kWeights>();
        AddBfloat16<kSums + 3, kRows + 1, kWeights + 1>();
      }
    }
    StoreTile<kSums>(own, 64);
    StoreTile<kSums + 1>(own + kTileFloats, 64);
    StoreTile<kSums + 2>(own + 2 * kTileFloats, 64);
    StoreTile<kSums + 3>(own + 3 * kTileFloats, 64);
  }

  // Blocks [block, end) of panels [begin, last).
  void Run(int64_t begin, int64_t last, int64_t block, int64_t end) const {
    const int64_t panel_bytes = NumTermBlocks(a.inner) * kPairBlockBytes;
    for (int64_t next; block < end; block = next) {
      next = std::min(end, block + kNearBlocks<kTerms>);
      for (int64_t panel = begin; panel < last; panel += 2) {
        const auto* first = static_cast<const uint8_t*>(a.w) + panel * panel_bytes;
        const uint8_t* second = panel + 1 < last ? first + panel_bytes : first;
        Add(first, second, panel, block, next, sums + (panel - begin) / 2 * kFourTiles);
      }
    }
  }

  void Finish(int64_t begin, int64_t last) const {
    for (int64_t m = 0; m < counts[0] + counts[1]; ++m) {
      const int64_t tile = m < counts[0] ? 0 : 1, line = m - tile * counts[0];
      for (int64_t panel = begin; panel < last; ++panel) {
        const float* four = sums + (panel - begin) / 2 * kFourTiles;
        const float* own = four + (tile * 2 + (panel - begin) % 2) * kTileFloats + line * kPanel;
        FinishPanel(a.out, row + m, panel, Load<F16>(own));
      }
    }
  }
};

template <int kTerms>
void PairsByTerms(const MatmulArgs& a) {
  if (a.rows <= kTileHeight) {
    const FewRowsOfPairs<kTerms> rows{a};
    const ConfiguredTiles configured(rows.Shapes());
    for (int64_t panel = a.begin; panel < a.end; panel += 2) rows.Run(panel, std::min<int64_t>(2, a.end - panel));
    return;
  }
  static thread_local Lines sums;
  constexpr int64_t kFloats = kNearPanels / 2 * kFourTiles;  // of two tiles of rows
  const int64_t blocks = NumTermBlocks(a.inner), tiles = std::min(kRowsTogether, a.rows + 2 * kTileHeight - 1);
  float* all = sums.Of(tiles / (2 * kTileHeight) * kFloats);
  for (int64_t from = 0; from < a.rows; from += kRowsTogether) {
    for (int64_t begin = a.begin; begin < a.end; begin += kNearPanels) {
      const int64_t last = std::min(a.end, begin + kNearPanels);
      for (int64_t block = 0; block < blocks; block += kStretch) {
        const int64_t end = std::min(blocks, block + kStretch);
        float* own = all;
        for (int64_t row = from; row < std::min(a.rows, from + kRowsTogether); row += 2 * kTileHeight, own += kFloats) {
          const int64_t left = a.rows - row, first = std::min(left, kTileHeight);
          const int64_t counts[2] = {first, std::min(left - first, kTileHeight)};
          const ConfiguredTiles configured(ShapesOfFour(counts));
          const ManyRowsOfPairs<kTerms> tiles_of_rows{a, row, {counts[0], counts[1]}, own};
          tiles_of_rows.Run(begin, last, block, end);
          if (end == blocks) tiles_of_rows.Finish(begin, last);
        }
      }
    }
  }
}

void PairsByTiles(const MatmulArgs& a) {
  if (a.terms == nullptr || a.inner == 0) return avx512_far::kKernels.pairs(a);
  a.num_terms == 1 ? PairsByTerms<1>(a) : PairsByTerms<kMostTerms>(a);
}

// ---- A table [outer, inner] ----

// Two tiles of the table's rows (the second maybe absent), as they lie there, times one of rows of x.
template <int kTerms>
struct TableTiles {
  const MatmulArgs& a;
  int64_t row, columns;  // of x

  static TileShapes Shapes(int64_t heights, int64_t columns) {
    TileShapes shapes;
    for (int i = 0; i < 2; ++i) {
      shapes.Set(i, heights, columns * 4);
      shapes.Set(2 + i, heights, 64);
    }
    for (int i = 0; i < kTerms; ++i) shapes.Set(4 + i, 16, columns * 4);
    return shapes;
  }

  template <int kTile>
  void LoadRows(const uint16_t* from, int64_t height, bool whole) const {
    if (whole) {
      for (int64_t i = 0; i < height; ++i) __builtin_prefetch(from + (i + 2 * height) * a.inner);
      return LoadTile<kTile>(from, a.inner * 2);
    }
    alignas(64) uint16_t rest[kTileHeight][kTermBlock] = {};
    for (int64_t i = 0; i < height; ++i) {
      std::copy(from + i * a.inner, from + i * a.inner + a.inner % kTermBlock, rest[i]);
    }
    LoadTile<kTile>(rest, 64);
  }

  // Rows [n, n + height) of the table, and as many from `second` on.
  void Run(int64_t n, int64_t second, int64_t height) const {
    const int64_t blocks = NumTermBlocks(a.inner);
    const auto* table = static_cast<const uint16_t*>(a.w);
    const uint16_t* x = a.terms + row * blocks * kTerms * kTermBlock;
    ZeroTile<0>();
    ZeroTile<1>();
    for (int64_t block = 0; block < blocks; ++block, x += kTerms * columns * kTermBlock) {
      const bool whole = (block + 1) * kTermBlock <= a.inner;
      LoadTile<4>(x, columns * 4);
      LoadRows<2>(table + n * a.inner + block * kTermBlock, height, whole);
      LoadRows<3>(table + second * a.inner + block * kTermBlock, height, whole);
      AddBfloat16<0, 2, 4>();
      AddBfloat16<1, 3, 4>();
      if constexpr (kTerms == 3) {
        LoadTile<5>(x + columns * kTermBlock, columns * 4);
        AddBfloat16<0, 2, 5>();
        AddBfloat16<1, 3, 5>();
        LoadTile<6>(x + 2 * columns * kTermBlock, columns * 4);
        AddBfloat16<0, 2, 6>();
        AddBfloat16<1, 3, 6>();
      }
    }
    Emit<0>(n, height);
    if (second != n) Emit<1>(second, height);
  }

  template <int kTile>
  void Emit(int64_t n, int64_t height) const {
    alignas(64) float sums[kTileHeight * kTileHeight], of_row[kTileHeight];
    StoreTile<kTile>(sums, columns * 4);
    for (int64_t m = 0; m < columns; ++m) {
      for (int64_t i = 0; i < height; ++i) of_row[i] = sums[i * columns + m];
      Finish(a.out, row + m, n, height, of_row);
    }
  }
};

template <int kTerms>
void TableByTiles(const MatmulArgs& a) {
  const int64_t last = a.end - (a.end - a.begin) % kTileHeight;  // where a tile is not whole
  for (int64_t row = 0; row < a.rows; row += kTileHeight) {
    const TableTiles<kTerms> tiles{a, row, std::min(kTileHeight, a.rows - row)};
    if (a.begin < last) {
      const ConfiguredTiles configured(tiles.Shapes(kTileHeight, tiles.columns));
      for (int64_t n = a.begin; n < last; n += 2 * kTileHeight) {
        tiles.Run(n, n + kTileHeight < last ? n + kTileHeight : n, kTileHeight);
      }
    }
    if (last < a.end) {
      const ConfiguredTiles configured(tiles.Shapes(a.end - last, tiles.columns));
      tiles.Run(last, last, a.end - last);
    }
  }
}

void UnembedByTiles(const MatmulArgs& a) {
  if (a.terms == nullptr || a.inner == 0) return avx512_far::kKernels.unembed(a);
  a.num_terms == 1 ? TableByTiles<1>(a) : TableByTiles<kMostTerms>(a);
}
