// Products with float32 and bfloat16 weights: a matrix [inner, outer], or a table [outer, inner].
// Part of kernels_impl.h.

// ---- Products with a matrix as it is, [inner, outer] ----

// Writes `count` sums of a row from column n on.
inline void Finish(const Output& out, int64_t row, int64_t n, int64_t count, const float* sums) {
  float* y = out.y + row * out.outer + n;
  const float* residual = out.residual ? out.residual + row * out.outer + n : nullptr;
  const float* bias = out.bias ? out.bias + n : nullptr;
  if (bias && residual) {
    for (int64_t i = 0; i < count; ++i) y[i] = sums[i] + bias[i] + residual[i];
  } else if (bias || residual) {
    const float* added = bias ? bias : residual;
    for (int64_t i = 0; i < count; ++i) y[i] = sums[i] + added[i];
  } else {
    std::copy(sums, sums + count, y);
  }
}

// What fits into registers.
//   kTile x kVectors       rows of x and vectors of columns in a tile of many rows
//   kDepth                 rows of w that few rows meet at a time
//   kWideStripe            pairs of vectors of one row's sums, where a stripe of them streams
//   kTableSums, kTableRows sums of a table's rows, and rows of x in them
//   kBlocksFrom            rows of x from which on blocks of w are packed for a tile
//   kOneFetches            whether one row of x fetches what follows, as several do
#if defined(__AVX512F__)
constexpr int64_t kTile = 12, kVectors = 2, kDepth = 8, kWideStripe = 12;
constexpr int64_t kTableSums = 16, kTableRows = 8, kBlocksFrom = kFewRows + 1;
constexpr bool kOneFetches = false;
#elif defined(__AVX2__)
constexpr int64_t kTile = 6, kVectors = 1, kDepth = 2, kWideStripe = 0;
constexpr int64_t kTableSums = 6, kTableRows = 3, kBlocksFrom = 9;
constexpr bool kOneFetches = true;
#else
constexpr int64_t kTile = 3, kVectors = 1, kDepth = 1, kWideStripe = 0;
constexpr int64_t kTableSums = 2, kTableRows = 8, kBlocksFrom = kFewRows + 1;
constexpr bool kOneFetches = false;
#endif
// Rows in the first of as few turns as `most` at a time allows, all of about the same length.
constexpr int64_t Evenly(int64_t rows, int64_t most) {
  const int64_t turns = (rows + most - 1) / most;
  return (rows + turns - 1) / turns;
}

constexpr int64_t kColumns = kVectors * kLanes;
constexpr int64_t kPair = 2 * kLanes;

// Columns n to n + 31 of a row of w; of bfloat16 the even ones, then the odd ones.
ROOFLAX_INLINE void LoadPair(const float* from, F16 (&pair)[2]) {
  pair[0] = Load<F16>(from);
  pair[1] = Load<F16>(from + kLanes);
}
ROOFLAX_INLINE void LoadPair(const uint16_t* from, F16 (&pair)[2]) {
  const U16 both = Load<U16>(from);
  pair[0] = As<F16>(both << 16);
  pair[1] = As<F16>(both & 0xffff0000u);
}

// Sums of pairs, in the order of their columns again.
inline void Unpair(const float*, float*, int64_t) {}
inline void Unpair(const uint16_t*, float* sums, int64_t count) {
  for (int64_t n = 0; n < count; n += kPair) {
    float even[kLanes], odd[kLanes];
    std::copy(sums + n, sums + n + kLanes, even);
    std::copy(sums + n + kLanes, sums + n + kPair, odd);
    for (int64_t i = 0; i < kLanes; ++i) {
      sums[n + 2 * i] = even[i];
      sums[n + 2 * i + 1] = odd[i];
    }
  }
}

// sums[m, n] += x[m, k + d] * w[k + d, n] for D rows of w, one after the other, and `width` columns.
template <int64_t M, int64_t D, typename W>
void AddRows(const MatmulArgs& a, const float* x, const W* w, int64_t width, float* sums) {
  const int64_t whole = width / kPair * kPair;
  for (int64_t n = 0; n < whole; n += kPair) {
    F16 wide[D][2];
    for (int64_t d = 0; d < D; ++d) {
      const W* line = w + d * a.out.outer + n;
      if constexpr (M > 1 || kOneFetches) {
        __builtin_prefetch(line + D * a.out.outer);
        if constexpr (sizeof(W) == 4) __builtin_prefetch(line + D * a.out.outer + kLanes);
      }
      LoadPair(line, wide[d]);
    }
    for (int64_t m = 0; m < M; ++m) {
      float* to = sums + m * a.parts_stride + n;
      F16 low = Load<F16>(to), high = Load<F16>(to + kLanes);
      for (int64_t d = 0; d < D; ++d) {
        low += x[m * a.inner + d] * wide[d][0];
        high += x[m * a.inner + d] * wide[d][1];
      }
      Store(to, low);
      Store(to + kLanes, high);
    }
  }
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = whole; n < width; ++n) {
      float sum = sums[m * a.parts_stride + n];
      for (int64_t d = 0; d < D; ++d) sum += x[m * a.inner + d] * Widen(w[d * a.out.outer + n]);
      sums[m * a.parts_stride + n] = sum;
    }
  }
}

constexpr int64_t kStripeAhead = 8;  // rows of w that are fetched before they are needed

// sums[n] = sum of x[k] * w[k, n] for kPairs pairs of columns, whose sums stay in registers; `next`
// is the stripe that follows. Their loads keep more of memory busy than those of `AddRows`, which
// wait for sums to be stored.
template <int64_t kPairs>
void OneRowStripe(const float* x, int64_t inner, const uint16_t* w, int64_t outer,
                  const uint16_t* next, float* to) {
  F16 sums[kPairs][2];
  for (auto& pair : sums) pair[0] = pair[1] = F16{};
  for (int64_t k = 0; k < inner; ++k) {
    const uint16_t* line = w + k * outer;
    const int64_t left = inner - k - kStripeAhead;
    const uint16_t* ahead = left > 0 ? line + kStripeAhead * outer : next - left * outer;
    for (int64_t i = 0; i < kPairs; ++i) {
      __builtin_prefetch(ahead + i * kPair);
      F16 wide[2];
      LoadPair(line + i * kPair, wide);
      sums[i][0] += x[k] * wide[0];
      sums[i][1] += x[k] * wide[1];
    }
  }
  for (int64_t i = 0; i < kPairs; ++i) {
    Store(to + i * kPair, sums[i][0]);
    Store(to + i * kPair + kLanes, sums[i][1]);
  }
  Unpair(w, to, kPairs * kPair);
}

// One row times bfloat16: one part's sums from column n on, by whole stripes; where those end.
template <int64_t kPairs>
int64_t OneRowStripes(const MatmulArgs& a, int64_t k_begin, int64_t k_end, int64_t n) {
  constexpr int64_t kStripe = kPairs * kPair;
  for (; n + kStripe <= a.end; n += kStripe) {
    const auto* w = static_cast<const uint16_t*>(a.w) + k_begin * a.out.outer + n;
    const uint16_t* next = n + 2 * kStripe <= a.end ? w + kStripe : w;
    OneRowStripe<kPairs>(a.x + k_begin, k_end - k_begin, w, a.out.outer, next,
                         a.parts + n - a.parts_begin);
  }
  return n;
}

// A block of w, as panels of kLanes columns in float32. The second cache holds it, the first one a
// panel at a time; a line more to a panel, so that panels do not share the cache's sets.
constexpr int64_t kBlockRows = 64, kBlockColumns = 256;
constexpr int64_t kBlockPanel = (kBlockRows + 1) * kLanes;

// sums[r, lane] += x[r, k] * panel[k, lane] for R rows.
template <int64_t R>
void BlockTile(const float* x, int64_t inner, int64_t count, const float* panel, float* sums,
               int64_t stride) {
  F16 own[R];
  ROOFLAX_WHOLE
  for (int64_t r = 0; r < R; ++r) own[r] = Load<F16>(sums + r * stride);
  for (int64_t k = 0; k < count; ++k) {
    const F16 w = Load<F16>(panel + k * kLanes);
    ROOFLAX_WHOLE
    for (int64_t r = 0; r < R; ++r) own[r] += x[r * inner + k] * w;
  }
  ROOFLAX_WHOLE
  for (int64_t r = 0; r < R; ++r) Store(sums + r * stride, own[r]);
}

// M rows in tiles of about the same height.
template <int64_t M>
void BlockTiles(const float* x, int64_t inner, int64_t count, const float* panel, float* sums,
                int64_t stride) {
  constexpr int64_t kFirst = Evenly(M, kTile);
  BlockTile<kFirst>(x, inner, count, panel, sums, stride);
  if constexpr (M > kFirst) {
    BlockTiles<M - kFirst>(x + kFirst * inner, inner, count, panel, sums + kFirst * stride, stride);
  }
}

// A block's rows of w, from column n on, as panels; the block below it is fetched meanwhile.
template <typename W>
void PackBlock(const W* w, int64_t outer, int64_t count, int64_t panels, float* packed) {
  for (int64_t k = 0; k < count; ++k) {
    const W* line = w + k * outer;
    for (int64_t p = 0; p < panels; ++p) {
      __builtin_prefetch(line + p * kLanes + kBlockRows * outer, 0, 2);
      Store(packed + p * kBlockPanel + k * kLanes, LoadWide(line + p * kLanes));
    }
  }
}

// Few rows, but several: one part's sums of the whole panels from column n on; where those end.
template <int64_t M, typename W>
int64_t Blocks(const MatmulArgs& a, int64_t k_begin, int64_t k_end, int64_t n) {
  alignas(64) float packed[kBlockColumns / kLanes * kBlockPanel];
  for (int64_t panels; (panels = std::min(kBlockColumns, a.end - n) / kLanes) > 0;
       n += panels * kLanes) {
    float* sums = a.parts + n - a.parts_begin;
    for (int64_t m = 0; m < M; ++m) std::fill_n(sums + m * a.parts_stride, panels * kLanes, 0.0f);
    for (int64_t k = k_begin, count; k < k_end; k += count) {
      count = std::min(kBlockRows, k_end - k);
      const W* w = static_cast<const W*>(a.w) + k * a.out.outer + n;
      PackBlock(w, a.out.outer, count, panels, packed);
      for (int64_t p = 0; p < panels; ++p) {
        BlockTiles<M>(a.x + k, a.inner, count, packed + p * kBlockPanel, sums + p * kLanes,
                      a.parts_stride);
      }
    }
  }
  return n;
}

// Sums of few rows, which stay in the first cache while w streams past them.
constexpr int64_t kFewSums = 4096;

// Few rows: one part's sums of columns [begin, end). w is read as it lies, row after row; from kBlocksFrom
// rows of x on, block after block.
template <int64_t M, typename W>
void MatmulFew(const MatmulArgs& a) {
  const auto* w = static_cast<const W*>(a.w);
  const int64_t k_begin = a.part * PartLength(a.inner);
  const int64_t k_end = std::min(a.inner, k_begin + PartLength(a.inner));
  constexpr int64_t kStretch = kFewSums / M / kPair * kPair;
  int64_t begin = a.begin;
  if constexpr (M == 1 && sizeof(W) == 2 && kWideStripe > 0) {
    begin = OneRowStripes<kWideStripe>(a, k_begin, k_end, begin);
    begin = OneRowStripes<kWideStripe / 3>(a, k_begin, k_end, begin);
  }
  if constexpr (M >= kBlocksFrom) begin = Blocks<M, W>(a, k_begin, k_end, begin);
  for (; begin < a.end; begin += kStretch) {
    const int64_t width = std::min(kStretch, a.end - begin);
    float* sums = a.parts + begin - a.parts_begin;
    for (int64_t m = 0; m < M; ++m) {
      std::fill(sums + m * a.parts_stride, sums + m * a.parts_stride + width, 0.0f);
    }
    int64_t k = k_begin;
    for (; k + kDepth <= k_end; k += kDepth) {
      AddRows<M, kDepth>(a, a.x + k, w + k * a.out.outer + begin, width, sums);
    }
    for (; k < k_end; ++k) AddRows<M, 1>(a, a.x + k, w + k * a.out.outer + begin, width, sums);
    for (int64_t m = 0; m < M; ++m) Unpair(w, sums + m * a.parts_stride, width / kPair * kPair);
  }
}

template <int64_t M, typename W>
void MatmulPartOf(const MatmulArgs& a) {
  if (a.rows == M) return MatmulFew<M, W>(a);
  if constexpr (M < kFewRows) return MatmulPartOf<M + 1, W>(a);
}

void MatmulPart(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? MatmulPartOf<1, float>(a) : MatmulPartOf<1, uint16_t>(a);
}

// The parts' sums added up in their order, into the output.
void AddParts(const MatmulArgs& a) {
  const int64_t parts = NumParts(a.inner), width = a.end - a.begin;
  for (int64_t m = 0; m < a.rows; ++m) {
    float* total = a.parts + m * a.parts_stride + a.begin - a.parts_begin;
    for (int64_t part = 1; part < parts; ++part) {
      const float* more = total + part * a.parts_size;
      for (int64_t n = 0; n < width; ++n) total[n] += more[n];
    }
    Finish(a.out, m, a.begin, width, total);
  }
}

// One tile of rows times columns that were packed as [inner, kColumns]: the sums over [begin, end).
template <int64_t M>
void MatmulTile(const float* x, int64_t inner, int64_t begin, int64_t end, const float* packed,
                F16 (&out)[kTile][kVectors]) {
  F16 sums[M][kVectors];
  for (auto& line : sums) {
    for (auto& sum : line) sum = F16{};
  }
  for (int64_t k = begin; k < end; ++k) {
    F16 w[kVectors];
    for (int64_t i = 0; i < kVectors; ++i) w[i] = Load<F16>(packed + k * kColumns + i * kLanes);
    for (int64_t m = 0; m < M; ++m) {
      const float value = x[m * inner + k];
      for (int64_t i = 0; i < kVectors; ++i) sums[m][i] += value * w[i];
    }
  }
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t i = 0; i < kVectors; ++i) out[m][i] = sums[m][i];
  }
}

// At most a tile of rows, of which `count` are there.
template <int64_t M = kTile>
void MatmulRows(int64_t count, const float* x, int64_t inner, int64_t begin, int64_t end,
                const float* packed, F16 (&out)[kTile][kVectors]) {
  if constexpr (M > 1) {
    if (count < M) return MatmulRows<M - 1>(count, x, inner, begin, end, packed, out);
  }
  MatmulTile<M>(x, inner, begin, end, packed, out);
}

// Every row of x times packed columns, summed in parts; emit(row, its vectors of sums). All rows meet a
// part of the columns before the next: where inputs are few it stays in the first cache meanwhile.
template <typename Emit>
void TilesOfRows(const float* x, int64_t rows, int64_t inner, int64_t part, const float* packed,
                 const Emit& emit) {
  static thread_local std::vector<float> totals;
  if (inner > part) totals.resize(static_cast<size_t>(rows * kColumns));
  int64_t begin = 0, end;
  do {  // once where there are no inputs
    end = std::min(inner, begin + part);
    for (int64_t row = 0; row < rows; row += kTile) {
      const int64_t count = std::min(kTile, rows - row);
      F16 sums[kTile][kVectors];
      MatmulRows(count, x + row * inner, inner, begin, end, packed, sums);
      for (int64_t m = 0; m < count; ++m) {
        const int64_t at = (row + m) * kColumns;
        for (int64_t i = 0; i < kVectors; ++i) {
          if (begin > 0) sums[m][i] = Load<F16>(&totals[at + i * kLanes]) + sums[m][i];
          if (end < inner) Store(&totals[at + i * kLanes], sums[m][i]);
        }
        if (end == inner) emit(row + m, sums[m]);
      }
    }
    begin = end;
  } while (begin < inner);
}

constexpr int64_t kPackAhead = 24;  // rows

// Many rows: some columns of w are packed once and meet every tile of rows.
template <typename W>
void MatmulMany(const MatmulArgs& a) {
  const auto* w = static_cast<const W*>(a.w);
  std::vector<float> packed(static_cast<size_t>(a.inner) * kColumns + 16);
  for (int64_t n = a.begin; n < a.end; n += kColumns) {
    const int64_t width = std::min(kColumns, a.end - n);
    for (int64_t k = 0; k < a.inner; ++k) {
      const W* from = w + k * a.out.outer + n;
      float* to = packed.data() + k * kColumns;
      for (int64_t i = 0; i < kColumns; i += 16) {
        __builtin_prefetch(from + kPackAhead * a.out.outer + i);
      }
      if (width == kColumns) {
        for (int64_t i = 0; i < kColumns; i += kLanes) Store(to + i, LoadWide(from + i));
      } else {
        for (int64_t i = 0; i < kColumns; ++i) to[i] = i < width ? Widen(from[i]) : 0.0f;
      }
    }
    TilesOfRows(a.x, a.rows, a.inner, PartLength(a.inner), packed.data(),
                [&](int64_t row, const F16* sums) {
                  alignas(64) float line[kColumns];
                  for (int64_t i = 0; i < kVectors; ++i) Store(line + i * kLanes, sums[i]);
                  Finish(a.out, row, n, width, line);
                });
  }
}

void Matmul(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? MatmulMany<float>(a) : MatmulMany<uint16_t>(a);
}

// ---- Products with a table, [outer, inner] ----

// sums[m, r] of R rows of the table, `stride` sums to a row of x; `ahead` is what comes after them.
template <int64_t M, int64_t R, typename W>
void UnembedSums(const float* x, int64_t inner, const W* table, int64_t ahead, int64_t stride,
                 F16* sums) {
  F16 own[M][R];
  ROOFLAX_WHOLE
  for (auto& line : own) {
    ROOFLAX_WHOLE
    for (auto& sum : line) sum = F16{};
  }
  for (int64_t k = 0; k + kLanes <= inner; k += kLanes) {
    F16 values[M];
    ROOFLAX_WHOLE
    for (int64_t m = 0; m < M; ++m) values[m] = Load<F16>(x + m * inner + k);
    ROOFLAX_WHOLE
    for (int64_t r = 0; r < R; ++r) {
      const W* line = table + r * inner + k;
      if (k * sizeof(W) % 64 == 0) __builtin_prefetch(line + ahead);
      const F16 wide = LoadWide(line);
      ROOFLAX_WHOLE
      for (int64_t m = 0; m < M; ++m) own[m][r] += values[m] * wide;
    }
  }
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) {
    ROOFLAX_WHOLE
    for (int64_t r = 0; r < R; ++r) sums[m * stride + r] = own[m][r];
  }
}

// Rows of the table, of r, that have their sums in registers together.
constexpr int64_t TableHeld(int64_t m, int64_t r) {
  int64_t held = std::clamp<int64_t>(kTableSums / Evenly(m, kTableRows), 1, r);
  while (r % held != 0) --held;
  return held;
}

// The same of any number of rows of x.
template <int64_t M, int64_t R, typename W>
void UnembedRowsOf(const float* x, int64_t inner, const W* table, int64_t ahead, int64_t stride,
                   F16* sums) {
  constexpr int64_t kFirst = Evenly(M, kTableRows);
  UnembedSums<kFirst, R>(x, inner, table, ahead, stride, sums);
  if constexpr (M > kFirst) {
    UnembedRowsOf<M - kFirst, R>(x + kFirst * inner, inner, table, ahead, stride,
                                 sums + kFirst * stride);
  }
}

// At most sixteen sums, so that their lanes are added up together.
template <int64_t M, int64_t R, typename W>
void UnembedTile(const MatmulArgs& a, int64_t row, int64_t first) {
  static_assert(M * R <= kLanes);
  constexpr int64_t kHeld = TableHeld(M, R);
  const W* table = static_cast<const W*>(a.w) + first * a.inner;
  const float* x = a.x + row * a.inner;
  const int64_t whole = a.inner / kLanes * kLanes;
  F16 sums[kLanes] = {};
  // Rows are short: the next ones must be on their way.
  for (int64_t r = 0; r + kHeld <= R; r += kHeld) {
    UnembedRowsOf<M, kHeld>(x, a.inner, table + r * a.inner, kHeld * a.inner, R, sums + r);
  }
  float total[kLanes];
  Store(total, SumEach(sums));
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t r = 0; r < R; ++r) {
      for (int64_t t = whole; t < a.inner; ++t) {
        total[m * R + r] += x[m * a.inner + t] * Widen(table[r * a.inner + t]);
      }
    }
    Finish(a.out, row + m, first, R, total + m * R);
  }
}

// Rows [begin, end) of the table.
template <int64_t M, int64_t R, typename W>
void UnembedRows(const MatmulArgs& a, int64_t row, int64_t begin, int64_t end) {
  int64_t v = begin;
  for (; v + R <= end; v += R) UnembedTile<M, R, W>(a, row, v);
  for (; v < end; ++v) UnembedTile<M, 1, W>(a, row, v);
}

template <typename W>
void UnembedLast(const MatmulArgs& a, int64_t row, int64_t begin, int64_t end) {
  switch (a.rows - row) {
    case 1: return UnembedRows<1, 16, W>(a, row, begin, end);
    case 2: return UnembedRows<2, 8, W>(a, row, begin, end);
    case 3: return UnembedRows<3, 5, W>(a, row, begin, end);
    case 4: return UnembedRows<4, 4, W>(a, row, begin, end);
    case 5: return UnembedRows<5, 3, W>(a, row, begin, end);
    case 6: return UnembedRows<6, 2, W>(a, row, begin, end);
    case 7: return UnembedRows<7, 2, W>(a, row, begin, end);
    default: return;
  }
}

// A few rows of the table, which stay in the first cache, meet all rows of x.
template <typename W>
void UnembedWidth(const MatmulArgs& a) {
  const int64_t step = a.rows <= 8 ? a.end - a.begin : 8;
  for (int64_t begin = a.begin; begin < a.end; begin += step) {
    const int64_t end = std::min(a.end, begin + step);
    int64_t row = 0;
    for (; row + 8 <= a.rows; row += 8) UnembedRows<8, 2, W>(a, row, begin, end);
    UnembedLast<W>(a, row, begin, end);
  }
}

void Unembed(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? UnembedWidth<float>(a) : UnembedWidth<uint16_t>(a);
}
