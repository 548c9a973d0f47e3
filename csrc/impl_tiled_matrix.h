// Matmuls with bfloat16 as it is, by tiles of AMX. Part of kernels_impl.h.
//
// A row of float32 is the sum of three rows of bfloat16 (of one, where it was bfloat16): x * w is the sum
// of exact products, added up in float32. The order does not depend on the number of rows: block of 32
// inputs after block, of a block term after term, of those the tile instruction's own.

static_assert(kTermBlock == 32 && kMostTerms == 3 && kTiledRows == kTileHeight);

// Sixteen numbers of a block as their terms.
template <int kTerms>
ROOFLAX_INLINE void TermsOf(F16 x, H16 (&terms)[kTerms]) {
  if constexpr (kTerms == 1) {
    terms[0] = ToBfloat16(x);
  } else {
    const auto high = [](F16 value) { return As<F16>(As<U16>(value) & 0xffff0000u); };
    const I16 finite = Abs(x) <= Broadcast(3.402823466e38f);
    F16 rest = x;
    for (auto& term : terms) {
      const F16 first = high(rest);
      term = LowHalves(As<U16>(first) >> 16);
      rest = Select(finite, rest - first, F16{});
    }
    // NaN stays NaN though its high bits may say otherwise.
    terms[0] = LowHalves(Select(x != x, As<U16>(x) | 0x400000u, As<U16>(x)) >> 16);
  }
}

template <int kTerms>
void SplitRow(const SplitArgs& a) {
  uint16_t* to = a.terms;
  for (int64_t k = 0; k < a.inner; k += kTermBlock, to += kTerms * a.rows * kTermBlock) {
    H16 terms[2][kTerms] = {};
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = k + half * kLanes, count = std::min(kLanes, a.inner - at);
      if (count > 0) TermsOf<kTerms>(LoadSome(a.x + at, count), terms[half]);
    }
    for (int term = 0; term < kTerms; ++term) {
      uint16_t* block = to + term * a.rows * kTermBlock;
      if (!a.table) {
        Store(block + a.row * kTermBlock, terms[0][term]);
        Store(block + a.row * kTermBlock + kLanes, terms[1][term]);
        continue;
      }
      uint32_t pairs[kTermBlock / 2];
      Store(pairs, terms[0][term]);
      Store(pairs + kLanes / 2, terms[1][term]);
      for (int64_t i = 0; i < kTermBlock / 2; ++i) Store(block + (i * a.rows + a.row) * 2, pairs[i]);
    }
  }
}

void SplitTerms(const SplitArgs& a) {
  a.num_terms == 1 ? SplitRow<1>(a) : SplitRow<kMostTerms>(a);
}

// ---- A matrix [inner, outer] ----

// 32 rows of w, of which `count` are there, by 32 columns, of which `columns` are: two tiles, each of 16
// pairs of rows by 16 columns.
ROOFLAX_INLINE void PackPairs(const uint16_t* w, int64_t step, int64_t count, int64_t columns,
                              uint8_t* to, int64_t apart) {
  typedef uint16_t H32 __attribute__((vector_size(64)));
  constexpr H32 kLow = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  constexpr H32 kHigh = kLow + 16;
  const auto row_of = [&](int64_t k) {
    if (k >= count) return H32{};
    if (columns >= 2 * kPanel) return Load<H32>(w + k * step);
    uint16_t some[2 * kPanel] = {};
    std::copy(w + k * step, w + k * step + columns, some);
    return Load<H32>(some);
  };
  for (int64_t pair = 0; pair < 16; ++pair) {
    const H32 first = row_of(2 * pair), second = row_of(2 * pair + 1);
    Store(to + pair * 64, __builtin_shuffle(first, second, kLow));
    Store(to + apart + pair * 64, __builtin_shuffle(first, second, kHigh));
  }
}

// Where the terms of rows [row, row + count) lie, of the block numbered `block`.
ROOFLAX_INLINE const uint16_t* TermsAt(const MatmulArgs& a, int64_t row, int64_t count, int64_t block) {
  return a.terms + (row * NumTermBlocks(a.inner) + block * count) * a.num_terms * kTermBlock;
}

constexpr int64_t kPartAhead = 128;  // columns that are fetched before they are needed

// Few rows: one part's sums of columns [begin, end), which stay in the first cache while 32 rows of w
// stream past them.
template <int kTerms>
void PartByTiles(const MatmulArgs& a) {
  constexpr int kFirst = 0, kTerm = 2, kPacked = 6;  // tiles: two of sums, the terms, two of w
  TileShapes shapes;
  for (int i = 0; i < 2; ++i) {
    shapes.Set(kFirst + i, a.rows, 64);
    shapes.Set(kPacked + i, 16, 64);
  }
  for (int i = 0; i < kTerms; ++i) shapes.Set(kTerm + i, a.rows, 64);
  const ConfiguredTiles configured(shapes);
  const int64_t outer = a.out.outer, stride = a.parts_stride * 4;
  alignas(64) uint8_t packed[2][1024];
  alignas(64) float rest[2][kTileHeight][kPanel];  // the sums of a last stripe that is not whole
  const int64_t part_length = TermPartLength(a.inner), k_begin = a.part * part_length;
  const int64_t k_end = std::min(a.inner, k_begin + part_length);
  for (int64_t k = k_begin; k < k_end; k += kTermBlock) {
    const uint16_t* x = TermsAt(a, 0, a.rows, k / kTermBlock);
    LoadTile<kTerm>(x, 64);
    if constexpr (kTerms == 3) {
      LoadTile<kTerm + 1>(x + a.rows * kTermBlock, 64);
      LoadTile<kTerm + 2>(x + 2 * a.rows * kTermBlock, 64);
    }
    const auto* w = static_cast<const uint16_t*>(a.w) + k * outer;
    const int64_t count = std::min(kTermBlock, a.inner - k);
    for (int64_t n = a.begin; n < a.end; n += 2 * kPanel) {
      const int64_t columns = std::min(2 * kPanel, a.end - n);
      for (int64_t i = 0; i < count; ++i) __builtin_prefetch(w + i * outer + n + kPartAhead);
      PackPairs(w + n, outer, count, columns, packed[0], sizeof(packed[0]));
      const bool whole = columns == 2 * kPanel;
      float* sums = whole ? a.parts + n - a.parts_begin : rest[0][0];
      float* second = whole ? sums + kPanel : rest[1][0];
      const int64_t step = whole ? stride : 64;
      if (k == k_begin) {
        ZeroTile<kFirst>();
        ZeroTile<kFirst + 1>();
      } else {
        LoadTile<kFirst>(sums, step);
        LoadTile<kFirst + 1>(second, step);
      }
      LoadTile<kPacked>(packed[0], 64);
      LoadTile<kPacked + 1>(packed[1], 64);
      AddBfloat16<kFirst, kTerm, kPacked>();
      AddBfloat16<kFirst + 1, kTerm, kPacked + 1>();
      if constexpr (kTerms == 3) {
        AddBfloat16<kFirst, kTerm + 1, kPacked>();
        AddBfloat16<kFirst + 1, kTerm + 1, kPacked + 1>();
        AddBfloat16<kFirst, kTerm + 2, kPacked>();
        AddBfloat16<kFirst + 1, kTerm + 2, kPacked + 1>();
      }
      StoreTile<kFirst>(sums, step);
      StoreTile<kFirst + 1>(second, step);
    }
  }
  const int64_t left = (a.end - a.begin) % (2 * kPanel), n = a.end - left;
  for (int64_t m = 0; left > 0 && m < a.rows; ++m) {
    for (int64_t i = 0; i < left; ++i) {
      a.parts[m * a.parts_stride + n + i - a.parts_begin] = rest[i / kPanel][m][i % kPanel];
    }
  }
}

void MatmulPartByTiles(const MatmulArgs& a) {
  if (a.terms == nullptr || a.inner == 0) return MatmulPart(a);
  a.num_terms == 1 ? PartByTiles<1>(a) : PartByTiles<kMostTerms>(a);
}

void AddPartsOfTiles(const MatmulArgs& a) {
  if (a.terms == nullptr) return AddParts(a);
  AddPartsOf(a, NumTermParts(a.inner));
}

// Blocks of w that are packed at a time, panels of them, and rows of x that they meet.
constexpr int64_t kPackedBlocks = 32, kPackedPanels = 16, kRowsTogether = 256;
constexpr int64_t kTileFloats = kTileHeight * kPanel, kFourTiles = 4 * kTileFloats;

// Two tiles of rows (the second maybe absent), times two panels, over `blocks` blocks.
template <int kTerms>
struct MatrixTiles {
  const MatmulArgs& a;
  int64_t row, counts[2];

  // sums: [2 tiles, 2 panels, 16, 16], of a part that begins with the first block, or went on before it.
  void Run(int64_t block, int64_t blocks, const uint8_t* first, const uint8_t* second, float* sums,
           bool begins) const {
    if (begins) {
      ZeroTile<kSums>();
      ZeroTile<kSums + 1>();
      ZeroTile<kSums + 2>();
      ZeroTile<kSums + 3>();
    } else {
      LoadTile<kSums>(sums, 64);
      LoadTile<kSums + 1>(sums + kTileFloats, 64);
      LoadTile<kSums + 2>(sums + 2 * kTileFloats, 64);
      LoadTile<kSums + 3>(sums + 3 * kTileFloats, 64);
    }
    const uint16_t* x = TermsAt(a, row, counts[0], block);
    const uint16_t* y = TermsAt(a, row + counts[0], counts[1], block);
    for (int64_t i = 0; i < blocks; ++i) {
      LoadTile<kWeights>(first + i * 1024, 64);
      LoadTile<kWeights + 1>(second + i * 1024, 64);
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
    StoreTile<kSums>(sums, 64);
    StoreTile<kSums + 1>(sums + kTileFloats, 64);
    StoreTile<kSums + 2>(sums + 2 * kTileFloats, 64);
    StoreTile<kSums + 3>(sums + 3 * kTileFloats, 64);
  }
};

// Rows [row, row + rows) times the columns of at most kPackedPanels panels from column n on.
template <int kTerms>
void BlockByTiles(const MatmulArgs& a, int64_t row, int64_t rows, int64_t n) {
  static thread_local BlockMemory memory;
  const int64_t columns = std::min(kPackedPanels * kPanel, a.end - n);
  const int64_t panels = (columns + 2 * kPanel - 1) / (2 * kPanel) * 2;  // an even number
  const int64_t tiles = (rows + 2 * kTileHeight - 1) / (2 * kTileHeight) * 2;
  const int64_t panel_bytes = kPackedBlocks * 1024, size = tiles * panels * kTileFloats;
  auto* packed = reinterpret_cast<uint8_t*>(memory.packed.Of(panels * panel_bytes / 4));
  float *sums = memory.current.Of(size), *done = memory.done.Of(size);
  const int64_t blocks = NumTermBlocks(a.inner), step = a.out.outer;
  const int64_t part_blocks = NumTermBlocks(TermPartLength(a.inner));
  for (int64_t block = 0, end; block < blocks; block = end) {
    end = std::min(blocks, block + kPackedBlocks);
    for (int64_t i = block; i < end; ++i) {
      const int64_t k = i * kTermBlock, count = std::min(kTermBlock, a.inner - k);
      const auto* w = static_cast<const uint16_t*>(a.w) + k * step + n;
      for (int64_t p = 0; p < panels; p += 2) {
        uint8_t* to = packed + p * panel_bytes + (i - block) * 1024;
        for (int64_t m = 0; m < count; ++m) __builtin_prefetch(w + (m + kTermBlock) * step + p * kPanel);
        PackPairs(w + p * kPanel, step, count, columns - p * kPanel, to, panel_bytes);
      }
    }
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const int64_t first = row + tile * kTileHeight, left = row + rows - first;
      const int64_t counts[2] = {std::min(left, kTileHeight),
                                 std::clamp<int64_t>(left - kTileHeight, 0, kTileHeight)};
      const ConfiguredTiles configured(ShapesOfFour(counts));
      const MatrixTiles<kTerms> two{a, first, {counts[0], counts[1]}};
      for (int64_t p = 0; p < panels; p += 2) {
        const uint8_t* from = packed + p * panel_bytes;
        const int64_t at = (tile / 2 * (panels / 2) + p / 2) * kFourTiles;
        for (int64_t i = block, next; i < end; i = next) {  // parts, or what of them is packed
          next = std::min(end, (i / part_blocks + 1) * part_blocks);
          const uint8_t* lines = from + (i - block) * 1024;
          two.Run(i, next - i, lines, lines + panel_bytes, sums + at, i % part_blocks == 0);
          if (next % part_blocks != 0 && next < blocks) continue;
          for (int64_t j = at; j < at + kFourTiles; j += kLanes) {
            const F16 part = Load<F16>(sums + j);
            Store(done + j, i < part_blocks ? part : Load<F16>(done + j) + part);
          }
        }
      }
    }
  }
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t tile = m / kTileHeight;
    for (int64_t p = 0; p * kPanel < columns; ++p) {
      const float* four = done + (tile / 2 * (panels / 2) + p / 2) * kFourTiles;
      const float* own = four + (tile % 2 * 2 + p % 2) * kTileFloats + m % kTileHeight * kPanel;
      FinishPanel(a.out, row + m, n / kPanel + p, Load<F16>(own));
    }
  }
}

void MatmulByTiles(const MatmulArgs& a) {
  if (a.terms == nullptr || a.inner == 0) return Matmul(a);
  for (int64_t n = a.begin; n < a.end; n += kPackedPanels * kPanel) {
    for (int64_t row = 0; row < a.rows; row += kRowsTogether) {
      const int64_t rows = std::min(kRowsTogether, a.rows - row);
      a.num_terms == 1 ? BlockByTiles<1>(a, row, rows, n) : BlockByTiles<kMostTerms>(a, row, rows, n);
    }
  }
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
  if (a.terms == nullptr || a.inner == 0) return Unembed(a);
  a.num_terms == 1 ? TableByTiles<1>(a) : TableByTiles<kMostTerms>(a);
}
