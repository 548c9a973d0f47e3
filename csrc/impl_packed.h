// Matmuls with packed weights. Part of kernels_impl.h.
//
// With activations in bytes the products of a group are summed exactly; with activations in float32
// the weights are widened, sixteen outputs at a time.

// The most rows of a tile, and of the matmuls that are made in one tile.
#if defined(__AVX512F__)
constexpr int64_t kTileRows = 12, kPanelRows = 8;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int64_t kTileRows = 4, kPanelRows = 4;
#else
constexpr int64_t kTileRows = 2, kPanelRows = 2;
#endif

// What a tile fetches while it multiplies: bytes that are so far ahead of those that it reads, `at` bytes
// into P panels. Behind the end of panels that lie beside each other come those that the next tile
// begins with there.
struct Further {
  template <int64_t P>
  ROOFLAX_INLINE int64_t Ahead(int64_t at, int64_t panel_bytes, int64_t apart) const {
    constexpr int64_t kAheadOf = kCodesApart && P > 1 ? kStreamAhead : 4096;
    const bool within = P == 1 || apart > 1 || at + kAheadOf < panel_bytes;
    return within ? kAheadOf : kAheadOf + (P - 1) * panel_bytes;
  }
};

// Of two tiles of rows that meet the same panels one after the other, each fetches half of the next.
struct HalfOfNext {
  int64_t begin;
  template <int64_t P>
  ROOFLAX_INLINE int64_t Ahead(int64_t at, int64_t, int64_t) const {
    return begin - at / 2;
  }
};

// Panels that a tile of several rows multiplies at once: two share what is loaded of x, but memory answers one
// faster, which few rows wait for.
constexpr int64_t PanelsBeside(int64_t rows) {
  constexpr int64_t kWaiting = kCodesApart ? 1 : 4;
  return rows > kWaiting && kRegisters >= 32 ? 2 : 1;
}

// M rows times the panels [begin, end), P of them at once: beside each other, or where a thread is to read
// several places at once, each the next of a P-th of the panels.
template <typename Tile, int64_t M, int64_t P, typename Fetch>
void PanelsOf(const PackedArgs& a, int64_t row, int64_t begin, int64_t end, Fetch fetch) {
  const int64_t turns = (end - begin) / P, apart = Tile::kApart ? turns : 1, next = Tile::kApart ? 1 : P;
  for (int64_t turn = 0; turn < turns; ++turn) {
    Tile::template Run<M, P>(a, row, begin + turn * next, apart, fetch);
  }
  for (int64_t panel = begin + turns * P; panel < end; ++panel) {
    Tile::template Run<M, 1>(a, row, panel, 1, fetch);
  }
}

// At most kPanelRows at once, times as many panels as the tile takes of so many rows.
template <typename Tile, int64_t M = 1, typename Fetch>
void FewRows(const PackedArgs& a, int64_t row, int64_t count, int64_t begin, int64_t end,
             Fetch fetch) {
  if (count == M) return PanelsOf<Tile, M, Tile::Panels(M)>(a, row, begin, end, fetch);
  if constexpr (M < kPanelRows) return FewRows<Tile, M + 1>(a, row, count, begin, end, fetch);
}

// A tile of `count` rows, at most kTileRows.
template <typename Tile, typename Fetch>
void TileOfRows(const PackedArgs& a, int64_t row, int64_t count, int64_t begin, int64_t end,
                Fetch fetch) {
  if constexpr (kTileRows > kPanelRows) {
    if (count == kTileRows) {
      return PanelsOf<Tile, kTileRows, Tile::Panels(kTileRows)>(a, row, begin, end, fetch);
    }
  }
  FewRows<Tile>(a, row, count, begin, end, fetch);
}

// Any number of rows: a few panels that stay in the cache meet every tile of rows. Two tiles with
// AVX-512 multiply no longer than memory takes to answer; elsewhere it makes no difference.
template <typename Tile>
void AllRows(const PackedArgs& a) {
  if (a.rows <= kPanelRows) return FewRows<Tile>(a, 0, a.rows, a.begin, a.end, Further{});
  constexpr int64_t kPanels = 2;
  const int64_t first = TileRows(a.rows, kTileRows), left = a.rows - first;
  for (int64_t panel = a.begin; panel < a.end; panel += kPanels) {
    const int64_t end = std::min(panel + kPanels, a.end);
    if constexpr (kTileRows > kPanelRows) {
      if (left > 0 && TileRows(left, kTileRows) == left) {
        const int64_t bytes = Tile::PanelBytes(a.stride), next = kPanels * bytes;
        TileOfRows<Tile>(a, 0, first, panel, end, HalfOfNext{next});
        TileOfRows<Tile>(a, first, left, panel, end, HalfOfNext{next + bytes / 2});
        continue;
      }
    }
    for (int64_t row = 0, count; row < a.rows; row += count) {
      count = TileRows(a.rows - row, kTileRows);
      TileOfRows<Tile>(a, row, count, panel, end, Further{});
    }
  }
}

inline void Prefetch(const uint8_t* from, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(from + i * 64);
}

// ---- Bytes times bytes, one scale per row and output ----

struct Int8Tile {
  static constexpr bool kApart = kCodesApart;
  static int64_t PanelBytes(int64_t stride) { return stride * kPanel; }

  // As many as memory is read from at once for few rows; for more, two share what is loaded of x.
  static constexpr int64_t Panels(int64_t rows) {
    return rows * 2 <= kCodeStreams ? kCodeStreams / rows : PanelsBeside(rows);
  }

  // Quads that take turns among as many sums, so that few rows' sums do not wait for each other.
  // Whole numbers add up alike in any order.
  static constexpr int64_t Turns(int64_t rows) {
    return std::clamp<int64_t>(kRegisters / 2 / (rows * Panels(rows)), 1, kPanelRows);
  }

  template <int64_t M, int64_t P, typename Fetch>
  static void Run(const PackedArgs& a, int64_t row, int64_t panel, int64_t apart, Fetch fetch) {
    constexpr int64_t T = Turns(M);
    const int64_t quads = a.stride / 4, whole = quads / T * T;
    const auto* x = static_cast<const uint8_t*>(a.x) + row * a.stride;
    const uint8_t* w = a.w + panel * quads * 64;
    I16 sums[T][P][M];
    ROOFLAX_WHOLE
    for (auto& turn : sums) {
      ROOFLAX_WHOLE
      for (auto& line : turn) {
        ROOFLAX_WHOLE
        for (auto& sum : line) sum = I16{};
      }
    }
    const auto add = [&](int64_t quad, I16 (&to)[P][M]) {
      I16 weights[P];
      const int64_t ahead = fetch.template Ahead<P>(quad * 64, PanelBytes(a.stride), apart);
      ROOFLAX_WHOLE
      for (int64_t p = 0; p < P; ++p) {
        const uint8_t* from = w + (p * apart * quads + quad) * 64;
        __builtin_prefetch(from + ahead);
        weights[p] = Load<I16>(from);
      }
      ROOFLAX_WHOLE
      for (int64_t m = 0; m < M; ++m) {
        const I16 value = BroadcastBytes(x + m * a.stride + quad * 4);
        ROOFLAX_WHOLE
        for (int64_t p = 0; p < P; ++p) to[p][m] = DotRow(to[p][m], value, weights[p]);
      }
    };
    for (int64_t quad = 0; quad < whole; quad += T) {
      for (int64_t t = 0; t < T; ++t) add(quad + t, sums[t]);
    }
    for (int64_t quad = whole; quad < quads; ++quad) add(quad, sums[0]);
    ROOFLAX_WHOLE
    for (int64_t p = 0; p < P; ++p) {
      const int64_t n = (panel + p * apart) * kPanel;
      const F16 w_scale = Load<F16>(static_cast<const float*>(a.w_scale) + n);
      const I16 offset = Load<I16>(a.w_sum + n) * kRowOffset;
      ROOFLAX_WHOLE
      for (int64_t m = 0; m < M; ++m) {
        ROOFLAX_WHOLE
        for (int64_t t = 1; t < T; ++t) sums[0][p][m] += sums[t][p][m];
        const F16 scale = w_scale * a.x_scale[row + m];
        FinishPanel(a.out, row + m, panel + p * apart, ToFloat(sums[0][p][m] - offset) * scale);
      }
    }
  }
};

// Elsewhere a dot product is so many instructions that a loop is better.
#if defined(__AVX2__)
#define ROOFLAX_UNROLL _Pragma("GCC unroll 8")
#else
#define ROOFLAX_UNROLL
#endif

// ---- Codes with a scale per group of 32 ----
//
// A group of a code lies in lines of 64 bytes, each a quad of sixteen outputs, or two in the halves of
// its bytes, `kLines` apart. `Unsigned` gives one of them as unsigned bytes, -StartTimes too large. Of
// codes of four bits, the products with int8 over `kTogether` of these parts of a group add up in 16 bits.
// Sixteen outputs' scales take `kScaleBytes`.

struct Int8Group {
  static constexpr int64_t kLines = 8, kParts = 1, kScaleBytes = 32;
  static I16 Unsigned(U16 codes, int64_t) { return As<I16>(codes ^ 0x80808080u); }
  static F16 Scale(const void* scales, int64_t block) {
    return LoadWide(static_cast<const Half*>(scales) + block * kPanel);
  }
};

struct Int4Group {
  static constexpr int64_t kLines = 4, kParts = 2, kTogether = 2, kScaleBytes = 32;
  static I16 Unsigned(U16 codes, int64_t part) {
    return As<I16>((part == 0 ? codes : codes >> 4) & 0x0f0f0f0fu);
  }
  static F16 Scale(const void* scales, int64_t block) { return Int8Group::Scale(scales, block); }
};

// The sixteen numbers of ggml's IQ4, 128 too large.
alignas(16) constexpr uint8_t kIq4Values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                129, 141, 153, 166, 181, 197, 217, 241};

struct Mxfp4Group {
  static constexpr int64_t kLines = 4, kParts = 2, kTogether = 1, kScaleBytes = 16;
  // Twice the value of e2m1, which is whole, plus 12.
  static I16 Unsigned(U16 codes, int64_t part) {
    alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                       12, 11, 10, 9,  8,  6,  4,  0};
    return LookUp(kTable, Int4Group::Unsigned(codes, part));
  }
  // Half of 2^(e - 127), for the doubled values; the two smallest are subnormal.
  ROOFLAX_INLINE static F16 Scale(const void* scales, int64_t block) {
    const auto* from = static_cast<const uint8_t*>(scales) + block * kPanel;
    const I16 e = LoadLanes(from);
    const I16 tiny = I16{} + 0x00200000, fault = I16{} + 0x7fc00000;
    const I16 bits = Select(e >= 2, (e - 1) << 23, Select(e == 1, tiny + tiny, tiny));
    return As<F16>(Select(e == 255, fault, bits));
  }
};

// ggml's IQ4_NL, 128 too large; for machines whose products of unsigned bytes are summed in 32 bits.
struct Iq4Group {
  static constexpr int64_t kLines = 4, kParts = 2, kTogether = 1, kScaleBytes = 32;
  static I16 Unsigned(U16 codes, int64_t part) { return LookUp(kIq4Values, Int4Group::Unsigned(codes, part)); }
  static F16 Scale(const void* scales, int64_t block) { return Int8Group::Scale(scales, block); }
};

#if !defined(__aarch64__)
template <typename Group>
struct GroupTile {
  static constexpr bool kApart = kCodesApart;
  static constexpr int64_t kGroupBytes = Group::kLines * 64;
  static int64_t PanelBytes(int64_t stride) { return stride / kGroup * kGroupBytes; }

  static constexpr int64_t Panels(int64_t rows) {
    return rows == 1 ? kCodeStreams : rows <= kPanelRows ? PanelsBeside(rows) : 1;
  }

#if defined(ROOFLAX_PAIRS_OF_BYTES)
  // The products of a group, whole numbers.
  template <int64_t M, int64_t P>
  static void Dots(const int8_t* x, const int32_t* x_start, const uint8_t* w, int64_t per_panel,
                   int64_t ahead, int64_t planes, I16 (&sums)[P][M]) {
    ROOFLAX_WHOLE
    for (int64_t p = 0; p < P; ++p, w += per_panel) {
      Prefetch(w + ahead, Group::kLines);
      if (planes == 2) {
        DotsOfWords(x, x_start, w, sums[p]);
      } else if constexpr (Group::kParts == 1) {
        DotsOfBytes(x, w, sums[p]);
      } else {
        DotsOfHalves(x, x_start, w, sums[p]);
      }
    }
  }

  // Codes of eight bits as they are, without an offset.
  template <int64_t M>
  static void DotsOfBytes(const int8_t* x, const uint8_t* w, I16 (&sums)[M]) {
    for (auto& sum : sums) sum = I16{};
    _Pragma("GCC unroll 2")
    for (int64_t line = 0; line < Group::kLines; ++line) {
      const I16 quad = Load<I16>(w + line * 64);
      for (int64_t m = 0; m < M; ++m) {
        sums[m] = DotRow(sums[m], BroadcastBytes(x + m * kGroup + line * 4), quad);
      }
    }
  }

  // Rows of two planes.
  template <int64_t M>
  static void DotsOfWords(const int8_t* x, const int32_t* x_start, const uint8_t* w, I16 (&sums)[M]) {
    constexpr bool kSigned = Group::kParts == 1;
    ROOFLAX_WHOLE
    for (int64_t m = 0; m < M; ++m) sums[m] = kSigned ? I16{} : BroadcastBytes(x_start + m);
    _Pragma("GCC unroll 2")
    for (int64_t line = 0; line < Group::kLines; ++line) {
      const U16 codes = Load<U16>(w + line * 64);
      ROOFLAX_WHOLE
      for (int64_t part = 0; part < Group::kParts; ++part) {
        const auto words = Words::Of<kSigned>(kSigned ? As<I16>(codes) : Group::Unsigned(codes, part));
        const int8_t* from = x + (part * Group::kLines + line) * 8;
        ROOFLAX_WHOLE
        for (int64_t m = 0; m < M; ++m) {
          sums[m] = DotWords(sums[m], words, from + m * 2 * kGroup);
          KeepInRegister(sums[m]);
        }
      }
    }
  }

  // Codes of four bits, whose products add up in 16 bits: of as many parts together as fit there.
  template <int64_t M>
  static void DotsOfHalves(const int8_t* x, const int32_t* x_start, const uint8_t* w,
                           I16 (&sums)[M]) {
    constexpr int64_t kTogether = Group::kTogether;
    ROOFLAX_WHOLE
    for (int64_t part = 0; part < Group::kParts; part += kTogether) {
      I16 pairs[M];
      ROOFLAX_WHOLE
      for (auto& pair : pairs) pair = I16{};
      ROOFLAX_WHOLE
      for (int64_t line = 0; line < Group::kLines; ++line) {
        const U16 codes = Load<U16>(w + line * 64);
        const int8_t* from = x + (part * Group::kLines + line) * 4;
        ROOFLAX_WHOLE
        for (int64_t i = 0; i < kTogether; ++i) {
          const I16 quad = Group::Unsigned(codes, part + i);
          ROOFLAX_WHOLE
          for (int64_t m = 0; m < M; ++m) {
            const I16 value = BroadcastBytes(from + m * kGroup + i * Group::kLines * 4);
            pairs[m] = AddPairs(pairs[m], quad, value);
            KeepInRegister(pairs[m]);
          }
        }
      }
      ROOFLAX_WHOLE
      for (int64_t m = 0; m < M; ++m) {
        sums[m] = AddBoth(part == 0 ? BroadcastBytes(x_start + m) : sums[m], pairs[m]);
      }
    }
  }
#else
  // The products of a group, whole numbers; of two planes those of the high bytes come first.
  template <int64_t M, int64_t P>
  static void Dots(const int8_t* x, const int32_t* x_start, const uint8_t* w, int64_t per_panel,
                   int64_t ahead, int64_t planes, I16 (&sums)[P][M]) {
    if (planes == 2) {
      ROOFLAX_WHOLE
      for (auto& line : sums) {
        ROOFLAX_WHOLE
        for (auto& sum : line) sum = I16{};
      }
      AddDots<M, P>(x + kGroup, 2 * kGroup, w, per_panel, ahead, sums);
    }
    for (int64_t m = 0; m < M; ++m) {
      const I16 start = BroadcastBytes(x_start + m);
      for (int64_t p = 0; p < P; ++p) sums[p][m] = planes == 2 ? (sums[p][m] << 8) + start : start;
    }
    AddDots<M, P>(x, planes * kGroup, w, per_panel, ahead, sums);
  }

  // Of rows that begin `row_bytes` from each other.
  template <int64_t M, int64_t P>
  static void AddDots(const int8_t* x, int64_t row_bytes, const uint8_t* w, int64_t per_panel, int64_t ahead,
                      I16 (&sums)[P][M]) {
    ROOFLAX_UNROLL
    for (int64_t line = 0; line < Group::kLines; ++line) {
      U16 codes[P];
      for (int64_t p = 0; p < P; ++p) {
        codes[p] = Load<U16>(w + p * per_panel + line * 64);
        __builtin_prefetch(w + p * per_panel + line * 64 + ahead);
        KeepInRegister(codes[p]);
      }
      for (int64_t part = 0; part < Group::kParts; ++part) {
        I16 quads[P];
        for (int64_t p = 0; p < P; ++p) quads[p] = Group::Unsigned(codes[p], part);
        for (int64_t m = 0; m < M; ++m) {
          const I16 value = BroadcastBytes(x + m * row_bytes + (part * Group::kLines + line) * 4);
          for (int64_t p = 0; p < P; ++p) sums[p][m] = Dot4(sums[p][m], quads[p], value);
        }
      }
    }
  }
#endif

  // Scales of the groups whose codes are fetched; as further places that memory is read from, they come
  // late otherwise.
  template <int64_t P>
  ROOFLAX_INLINE static void FetchScales(const void* scales, int64_t block, int64_t apart) {
    for (int64_t p = 0; p < P; ++p) {
      const int64_t further = block + p * apart + kStreamAhead / kGroupBytes;
      __builtin_prefetch(static_cast<const uint8_t*>(scales) + further * Group::kScaleBytes);
    }
  }

  template <int64_t M, int64_t P, typename Fetch>
  static void Run(const PackedArgs& a, int64_t row, int64_t panel, int64_t apart, Fetch fetch) {
    const int64_t groups = a.stride / kGroup, panel_bytes = PanelBytes(a.stride);
    const auto* x = static_cast<const int8_t*>(a.x) + row * a.stride * a.planes;
    const float* x_scale = a.x_scale + row * groups;
    const int32_t* x_start = a.x_start + row * groups;
    F16 totals[P][M];
    ROOFLAX_WHOLE
    for (auto& line : totals) {
      ROOFLAX_WHOLE
      for (auto& total : line) total = F16{};
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t block = panel * groups + g;
      I16 sums[P][M];
      if constexpr (kCodesApart && M == 1) FetchScales<P>(a.w_scale, block, apart * groups);
      const int64_t ahead = fetch.template Ahead<P>(g * kGroupBytes, panel_bytes, apart);
      Dots<M, P>(x + g * M * kGroup * a.planes, x_start + g * M, a.w + block * kGroupBytes, apart * panel_bytes,
                 ahead, a.planes, sums);
      ROOFLAX_WHOLE
      for (int64_t p = 0; p < P; ++p) {
        const F16 scale = Group::Scale(a.w_scale, block + p * apart * groups);
        ROOFLAX_WHOLE
        for (int64_t m = 0; m < M; ++m) {
          totals[p][m] += ToFloat(sums[p][m]) * (scale * x_scale[g * M + m]);
          // Seven or eight rows by two panels: their sums alone take half of the registers.
          if constexpr (kRegisters >= 32 && P * M > 12) KeepInMemory(totals[p][m]);
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
#endif

// ---- Float32 times widened weights ----
//
// A code gives a group's weights as 32 vectors of sixteen outputs, k after k. Where the scale is the
// output's, it comes at the end.

// Codes of a byte.
template <typename Byte>
struct ByteWide {
  static constexpr bool kGrouped = false;
  static int64_t Bytes(const PackedArgs&) { return 512; }
  static void Widen(const PackedArgs&, int64_t, const uint8_t* from, int64_t quads, F16* w) {
    for (int64_t s = 0; s < quads; ++s) {
      const I16 lanes = Load<I16>(from + s * 64);
      for (int64_t j = 0; j < 4; ++j) w[s * 4 + j] = Byte::Value(lanes, j);
    }
  }
};

struct Int8Byte {
  static F16 Value(I16 lanes, int64_t j) { return ToFloat((lanes << (24 - 8 * j)) >> 24); }
};

struct Fp8Byte {
  static F16 Value(I16 lanes, int64_t j) { return FromE4m3((lanes >> (8 * j)) & 0xff); }
};

struct Int8GroupWide {
  static constexpr bool kGrouped = true;
  static int64_t Bytes(const PackedArgs&) { return 512; }
  static void Widen(const PackedArgs& a, int64_t block, const uint8_t* from, int64_t quads,
                    F16* w) {
    ByteWide<Int8Byte>::Widen(a, block, from, quads, w);
    const F16 scale = Int8Group::Scale(a.w_scale, block);
    for (int64_t k = 0; k < kGroup; ++k) w[k] *= scale;
  }
};

// Codes of four bits by a table of their sixteen values.
template <typename Group>
struct NibbleWide {
  static constexpr bool kGrouped = true;
  static int64_t Bytes(const PackedArgs&) { return 256; }
  static void Widen(const PackedArgs& a, int64_t block, const uint8_t* from, int64_t, F16* w) {
    const F16 table = Values(), scale = Group::Scale(a.w_scale, block);
    for (int64_t s = 0; s < 4; ++s) {
      const U16 both = Load<U16>(from + s * 64);
      for (int64_t j = 0; j < 4; ++j) {
        w[s * 4 + j] = TakeLanes(table, both >> (8 * j)) * scale;
        w[16 + s * 4 + j] = TakeLanes(table, both >> (8 * j + 4)) * scale;
      }
    }
  }
  static F16 Values();
};

template <>
ROOFLAX_INLINE F16 NibbleWide<Int4Group>::Values() {
  static constexpr float kValues[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return Load<F16>(kValues);
}

template <>
ROOFLAX_INLINE F16 NibbleWide<Mxfp4Group>::Values() {  // doubled, as its scale is halved
  static constexpr float kValues[] = {0,     1,  2,  3,  4,  6,  8,  12,
                                      -0.0f, -1, -2, -3, -4, -6, -8, -12};
  return Load<F16>(kValues);
}

// Scales in float32, of each group or of each of its parts.
template <int64_t kParts>
ROOFLAX_INLINE F16 FloatScale(const PackedArgs& a, int64_t block, int64_t part) {
  return Load<F16>(static_cast<const float*>(a.w_scale) + (block * kParts + part) * kPanel);
}

struct Fp8GroupWide {
  static constexpr bool kGrouped = true;
  static int64_t Bytes(const PackedArgs&) { return 512; }
  static void Widen(const PackedArgs& a, int64_t block, const uint8_t* from, int64_t quads, F16* w) {
    ByteWide<Fp8Byte>::Widen(a, block, from, quads, w);
    const F16 scale = FloatScale<1>(a, block, 0);
    for (int64_t k = 0; k < kGroup; ++k) w[k] *= scale;
  }
};

// As NibbleWide, with float32 scales. A type has its sixteen values, and how many parts of a group have scales.
struct Nf4 {
  static constexpr int64_t kParts = 1;
  static constexpr const float* kValues = kNf4Values;
};
struct Nvfp4 {
  static constexpr int64_t kParts = 2;
  static constexpr float kValues[] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                      -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
};
template <typename Type>
struct FloatNibbleWide {
  static constexpr bool kGrouped = true;
  static int64_t Bytes(const PackedArgs&) { return 256; }
  static void Widen(const PackedArgs& a, int64_t block, const uint8_t* from, int64_t, F16* w) {
    const F16 table = Load<F16>(Type::kValues);
    const F16 low = FloatScale<Type::kParts>(a, block, 0);
    const F16 high = FloatScale<Type::kParts>(a, block, Type::kParts - 1);
    for (int64_t s = 0; s < 4; ++s) {
      const U16 both = Load<U16>(from + s * 64);
      for (int64_t j = 0; j < 4; ++j) {
        w[s * 4 + j] = TakeLanes(table, both >> (8 * j)) * low;
        w[16 + s * 4 + j] = TakeLanes(table, both >> (8 * j + 4)) * high;
      }
    }
  }
};

template <typename Wide>
inline const uint8_t* GroupAt(const PackedArgs& a, int64_t panel, int64_t g) {
  return a.w + panel * (a.stride * Wide::Bytes(a) / kGroup) + g * Wide::Bytes(a);
}

ROOFLAX_INLINE F16 OutputScale(const PackedArgs& a, int64_t panel) {
  return Load<F16>(static_cast<const float*>(a.w_scale) + panel * kPanel);
}

template <typename Wide>
struct WideTile {
  static constexpr bool kApart = kFarApart;

  static constexpr int64_t Panels(int64_t rows) {
    return rows == 1 ? kPanelRows / 2 : rows <= kPanelRows * 3 / 8 ? 2 : 1;
  }

  template <int64_t M, int64_t P>
  static void Run(const PackedArgs& a, int64_t row, int64_t panel, int64_t apart, Further) {
    const int64_t groups = (a.stride + kGroup - 1) / kGroup;
    const auto* x = static_cast<const float*>(a.x) + row * a.inner;
    F16 sums[P][M];
    for (auto& line : sums) {
      for (auto& sum : line) sum = F16{};
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t quads = std::min<int64_t>(8, a.stride / 4 - g * 8);
      const int64_t count = std::min(kGroup, a.inner - g * kGroup);
      F16 w[P][kGroup];
      for (int64_t p = 0; p < P; ++p) {
        const uint8_t* from = GroupAt<Wide>(a, panel + p * apart, g);
        Prefetch(from + 2048, Wide::Bytes(a) / 64);
        Wide::Widen(a, (panel + p * apart) * groups + g, from, quads, w[p]);
      }
      for (int64_t k = 0; k < count; ++k) {
        for (int64_t m = 0; m < M; ++m) {
          const float value = x[m * a.inner + g * kGroup + k];
          for (int64_t p = 0; p < P; ++p) sums[p][m] += value * w[p][k];
        }
      }
    }
    for (int64_t p = 0; p < P; ++p) {
      for (int64_t m = 0; m < M; ++m) {
        if (!Wide::kGrouped) sums[p][m] *= OutputScale(a, panel + p * apart);
        FinishPanel(a.out, row + m, panel + p * apart, sums[p][m]);
      }
    }
  }
};

// Inputs [k, k_end) of panels as floats; `first` and `count` are in units of kVectors panels.
template <typename Wide>
void WidenPanels(const PackedArgs& a, int64_t first, int64_t count, int64_t k, int64_t k_end,
                 float* to) {
  const int64_t groups = (a.stride + kGroup - 1) / kGroup;
  for (int64_t i = 0; i < count * kVectors; ++i) {
    const int64_t panel = a.begin + first * kVectors + i;
    float* own = to + i / kVectors * kBlockInner * kColumns + i % kVectors * kLanes;
    for (int64_t g = k / kGroup; panel < a.end && g * kGroup < k_end; ++g) {
      const int64_t quads = std::min<int64_t>(8, a.stride / 4 - g * 8);
      F16 w[kGroup];
      Wide::Widen(a, panel * groups + g, GroupAt<Wide>(a, panel, g), quads, w);
      for (int64_t row = g * kGroup; row < std::min(k_end, (g + 1) * kGroup); ++row) {
        Store(own + (row - k) * kColumns, w[row - g * kGroup]);
      }
    }
  }
}

// Many rows. All inputs are one part.
template <typename Wide>
void WideMany(const PackedArgs& a) {
  const auto pack = [&](int64_t first, int64_t count, int64_t k, int64_t k_end, float* to) {
    WidenPanels<Wide>(a, first, count, k, k_end, to);
  };
  const int64_t all = a.end - a.begin;
  MultiplyMany(static_cast<const float*>(a.x), a.rows, a.inner, std::max<int64_t>(1, a.inner), 0,
               (all + kVectors - 1) / kVectors, pack,
               [&](int64_t row, int64_t first, const float* sums) {
                 for (int64_t i = first * kVectors; i < std::min(all, (first + 1) * kVectors); ++i) {
                   F16 sum = Load<F16>(sums + i % kVectors * kLanes);
                   if (!Wide::kGrouped) sum *= OutputScale(a, a.begin + i);
                   FinishPanel(a.out, row, a.begin + i, sum);
                 }
               });
}

template <typename Wide>
void PackedCode(const PackedArgs& a) {
  if (a.rows <= kPanelRows) return FewRows<WideTile<Wide>>(a, 0, a.rows, a.begin, a.end, Further{});
  WideMany<Wide>(a);
}

// The weights themselves, [inner, outer]. Panels are taken a few at a time, so that what is written lies together.
template <typename Wide>
void NumbersOf(const PackedArgs& a) {
  constexpr int64_t kTogether = 8;
  const int64_t groups = (a.stride + kGroup - 1) / kGroup;
  for (int64_t first = a.begin; first < a.end; first += kTogether) {
    const int64_t last = std::min(first + kTogether, a.end);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t quads = std::min<int64_t>(8, a.stride / 4 - g * 8), count = std::min(kGroup, a.inner - g * kGroup);
      for (int64_t panel = first; panel < last; ++panel) {
        F16 w[kGroup];
        Wide::Widen(a, panel * groups + g, GroupAt<Wide>(a, panel, g), quads, w);
        float* to = static_cast<float*>(a.out.y) + g * kGroup * a.out.outer + panel * kPanel;
        const int64_t lanes = std::min(kPanel, a.out.outer - panel * kPanel);
        const F16 scale = Wide::kGrouped ? Broadcast(1.0f) : OutputScale(a, panel);
        for (int64_t k = 0; k < count; ++k) {
          StoreSome(to + k * a.out.outer, Wide::kGrouped ? w[k] : w[k] * scale, lanes);
        }
      }
    }
  }
}
