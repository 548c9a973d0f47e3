// Matmuls with a table of float32 or bfloat16, [outer, inner]. Part of kernels_impl.h.

// What fits into registers, and into the first cache.
//   kTableSums, kTableRows  sums of a table's rows, and rows of x in them
//   kTableNear              rows of the table that all rows of x meet, before the next ones
#if defined(__AVX512F__)
constexpr int64_t kTableSums = 16, kTableRows = 8, kTableNear = 8;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int64_t kTableSums = 4, kTableRows = 3, kTableNear = 16;
#else
constexpr int64_t kTableSums = 2, kTableRows = 8, kTableNear = 8;
#endif

// Sixteen numbers of a table; of bfloat16 AVX2 has them cheapest in an order of their own, in which
// `Mixed` puts other vectors, and out of which it takes them.
template <typename W>
ROOFLAX_INLINE F16 LoadMixed(const W* from) {
  return LoadWide(from);
}
template <typename W>
ROOFLAX_INLINE F16 Mixed(F16 x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(W) == 2) {
    const F16 own = x;
    x.at[0] = _mm256_permute2f128_ps(own.at[0], own.at[1], 0x20);
    x.at[1] = _mm256_permute2f128_ps(own.at[0], own.at[1], 0x31);
  }
#endif
  return x;
}
#if defined(__AVX2__) && !defined(__AVX512F__)
ROOFLAX_INLINE F16 LoadMixed(const uint16_t* from) {
  const auto all = Load<__m256i>(from);
  F16 out;
  out.at[0] = (F16::Piece)_mm256_unpacklo_epi16(__m256i{}, all);
  out.at[1] = (F16::Piece)_mm256_unpackhi_epi16(__m256i{}, all);
  return out;
}
#endif

// Sums of M rows of x with R of the table, `apart` numbers from each other: sums[m * row + r * stride].
// `ahead` is how far ahead they are fetched.
template <int64_t M, int64_t R, typename W>
void UnembedSums(const float* x, int64_t inner, const W* table, int64_t apart, int64_t ahead,
                 F16* sums, int64_t row, int64_t stride) {
  F16 own[M][R];
  ROOFLAX_WHOLE
  for (auto& line : own) {
    ROOFLAX_WHOLE
    for (auto& sum : line) sum = F16{};
  }
  for (int64_t k = 0; k + kLanes <= inner; k += kLanes) {
    F16 values[M];
    ROOFLAX_WHOLE
    for (int64_t m = 0; m < M; ++m) values[m] = Mixed<W>(Load<F16>(x + m * inner + k));
    ROOFLAX_WHOLE
    for (int64_t r = 0; r < R; ++r) {
      const W* line = table + r * apart + k;
      if (k * sizeof(W) % 64 == 0) __builtin_prefetch(line + ahead);
      const F16 wide = LoadMixed(line);
      ROOFLAX_WHOLE
      for (int64_t m = 0; m < M; ++m) own[m][r] += values[m] * wide;
    }
  }
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) {
    ROOFLAX_WHOLE
    for (int64_t r = 0; r < R; ++r) sums[m * row + r * stride] = Mixed<W>(own[m][r]);
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
void UnembedRowsOf(const float* x, int64_t inner, const W* table, int64_t apart, int64_t ahead,
                   F16* sums, int64_t row, int64_t stride) {
  constexpr int64_t kFirst = Evenly(M, kTableRows);
  UnembedSums<kFirst, R>(x, inner, table, apart, ahead, sums, row, stride);
  if constexpr (M > kFirst) {
    UnembedRowsOf<M - kFirst, R>(x + kFirst * inner, inner, table, apart, ahead,
                                 sums + kFirst * row, row, stride);
  }
}

// Sums of M rows of x with R of the table, at most sixteen, so that their lanes are added up together:
// the table's rows are runs of kRun, which begin `apart` rows from each other.
template <int64_t M, int64_t R, int64_t kRun, typename W>
void FinishTile(const MatmulArgs& a, int64_t row, int64_t first, int64_t apart, const F16* sums) {
  static_assert(M * R <= kLanes);
  const W* table = static_cast<const W*>(a.w) + first * a.inner;
  const float* x = a.x + row * a.inner;
  const int64_t whole = a.inner / kLanes * kLanes;
  float total[kLanes];
  Store(total, SumEach(sums));
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t h = 0; h < R / kRun; ++h) {
      float* run = total + m * R + h * kRun;
      for (int64_t i = 0; i < kRun; ++i) {
        const W* line = table + (h * apart + i) * a.inner;
        if (whole < a.inner) run[i] = AddTail(run[i], x + m * a.inner, line, whole, a.inner);
      }
      Finish(a.out, row + m, first + h * apart, kRun, run);
    }
  }
}

// The same from x and the table, whose runs are read at once, each a row at a time.
template <int64_t M, int64_t R, typename W>
void UnembedTile(const MatmulArgs& a, int64_t row, int64_t first, int64_t apart, int64_t ahead) {
  constexpr int64_t kHeld = TableHeld(M, R), kRun = R / kHeld;
  const W* table = static_cast<const W*>(a.w) + first * a.inner;
  F16 sums[kLanes] = {};
  for (int64_t i = 0; i < kRun; ++i) {
    UnembedRowsOf<M, kHeld>(a.x + row * a.inner, a.inner, table + i * a.inner, apart * a.inner,
                            ahead, sums + i, R, kRun);
  }
  FinishTile<M, R, kRun, W>(a, row, first, apart, sums);
}

// Rows [begin, end) of the table.
template <int64_t M, int64_t R, typename W>
void UnembedRows(const MatmulArgs& a, int64_t row, int64_t begin, int64_t end) {
  constexpr int64_t kHeld = TableHeld(M, R), kRun = R / kHeld;
  constexpr bool kFar = kFarApart && kHeld > 1;
  const int64_t tiles = (end - begin) / R, apart = kFar ? tiles * kRun : kRun;
  const int64_t next = kFar ? kRun : R, ahead = kFar ? kStreamAhead / sizeof(W) : kHeld * a.inner;
  for (int64_t t = 0; t < tiles; ++t) UnembedTile<M, R, W>(a, row, begin + t * next, apart, ahead);
  for (int64_t v = begin + tiles * R; v < end; ++v) UnembedTile<M, 1, W>(a, row, v, 1, a.inner);
}

// ---- In blocks: rows of x that the first cache would not hold whole ----

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t kTableFew = 4;  // the most rows of x that do without blocks
constexpr int64_t kTableInner = 256, kTablePairs = kTableNear / 2;  // inputs, and pairs of the table's rows

// Sums of M rows of x with two of the table over `count` inputs, from where they were left:
// sums[m * 2 + r]. With kFetch the table's next pair is fetched.
template <int64_t M, bool kFetch>
ROOFLAX_INLINE void PairWithTile(const float* x, int64_t inner, const float* one, const float* two,
                                 int64_t count, bool first, F16* sums) {
  F16 own[M][2];
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) {
    ROOFLAX_WHOLE
    for (int64_t r = 0; r < 2; ++r) own[m][r] = first ? F16{} : sums[m * 2 + r];
  }
  for (int64_t k = 0; k < count; k += kLanes) {
    if constexpr (kFetch) {
      __builtin_prefetch(one + k + 2 * inner);
      __builtin_prefetch(two + k + 2 * inner);
    }
    ROOFLAX_EACH {
      const int64_t at = k + i * kPieceLanes;
      const auto w_one = Load<F16::Piece>(one + at), w_two = Load<F16::Piece>(two + at);
      ROOFLAX_WHOLE
      for (int64_t m = 0; m < M; ++m) {
        auto value = Load<F16::Piece>(x + m * inner + at);
        asm("" : "+x"(value));  // loaded once, not by each of the two instructions that use it
        own[m][0].at[i] += value * w_one;
        own[m][1].at[i] += value * w_two;
      }
    }
  }
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) {
    ROOFLAX_WHOLE
    for (int64_t r = 0; r < 2; ++r) sums[m * 2 + r] = own[m][r];
  }
}

// The same of any number of rows of x.
template <int64_t M, bool kFetch>
void PairWithRows(const float* x, int64_t inner, const float* one, const float* two, int64_t count,
                  bool first, F16* sums) {
  constexpr int64_t kFirst = Evenly(M, kTableRows);
  PairWithTile<kFirst, kFetch>(x, inner, one, two, count, first, sums);
  if constexpr (M > kFirst) {
    PairWithRows<M - kFirst, false>(x + kFirst * inner, inner, one, two, count, first,
                                    sums + 2 * kFirst);
  }
}

// The same with a pair of the table's rows as they are, one after the other: of bfloat16 they are widened
// once for all rows of x.
template <int64_t M>
void MultiplyPair(const float* x, int64_t inner, const float* pair, int64_t count, bool first,
                  F16* sums) {
  PairWithRows<M, true>(x, inner, pair, pair + inner, count, first, sums);
}
template <int64_t M>
void MultiplyPair(const float* x, int64_t inner, const uint16_t* pair, int64_t count, bool first,
                  F16* sums) {
  alignas(64) float wide[2 * kTableInner];
  for (int64_t k = 0; k < count; k += kLanes) {
    if (k % 32 == 0) {
      __builtin_prefetch(pair + k + 2 * inner);
      __builtin_prefetch(pair + k + 3 * inner);
    }
    Store(wide + k, LoadWide(pair + k));
    Store(wide + kTableInner + k, LoadWide(pair + inner + k));
  }
  PairWithRows<M, false>(x, inner, wide, wide + kTableInner, count, first, sums);
}

// Some pairs of the table's rows, from `begin` on.
template <int64_t M, typename W>
void UnembedBlock(const MatmulArgs& a, int64_t row, int64_t begin, int64_t pairs) {
  static_assert(2 * M <= kLanes);
  const W* table = static_cast<const W*>(a.w) + begin * a.inner;
  const float* x = a.x + row * a.inner;
  const int64_t whole = a.inner / kLanes * kLanes;
  F16 sums[kTablePairs][kLanes] = {};
  for (int64_t k = 0; k < whole; k += kTableInner) {
    const int64_t count = std::min(kTableInner, whole - k);
    for (int64_t p = 0; p < pairs; ++p) {
      MultiplyPair<M>(x + k, a.inner, table + 2 * p * a.inner + k, count, k == 0, sums[p]);
    }
  }
  for (int64_t p = 0; p < pairs; ++p) {
    FinishTile<M, 2, 2, W>(a, row, begin + 2 * p, 0, sums[p]);
  }
}

// Rows [begin, end) of the table.
template <int64_t M, typename W>
void UnembedBlocks(const MatmulArgs& a, int64_t row, int64_t begin, int64_t end) {
  const int64_t pairs = (end - begin) / 2;
  for (int64_t p = 0; p < pairs; p += kTablePairs) {
    UnembedBlock<M, W>(a, row, begin + 2 * p, std::min(kTablePairs, pairs - p));
  }
  for (int64_t v = begin + 2 * pairs; v < end; ++v) UnembedTile<M, 1, W>(a, row, v, 1, a.inner);
}
#endif

// M rows of x, with tiles of R rows of the table; more than few of them in blocks, if there are such.
template <int64_t M, int64_t R, typename W>
void UnembedSome(const MatmulArgs& a, int64_t row, int64_t begin, int64_t end) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (M > kTableFew) {
    UnembedBlocks<M, W>(a, row, begin, end);
  } else {
    UnembedRows<M, R, W>(a, row, begin, end);
  }
#else
  UnembedRows<M, R, W>(a, row, begin, end);
#endif
}

template <typename W>
void UnembedLast(const MatmulArgs& a, int64_t row, int64_t begin, int64_t end) {
  switch (a.rows - row) {
    case 1: return UnembedSome<1, 16, W>(a, row, begin, end);
    case 2: return UnembedSome<2, 8, W>(a, row, begin, end);
    case 3: return UnembedSome<3, 5, W>(a, row, begin, end);
    case 4: return UnembedSome<4, 4, W>(a, row, begin, end);
    case 5: return UnembedSome<5, 3, W>(a, row, begin, end);
    case 6: return UnembedSome<6, 2, W>(a, row, begin, end);
    case 7: return UnembedSome<7, 2, W>(a, row, begin, end);
    default: return;
  }
}

// Some rows of the table, which stay in the cache, meet all rows of x.
template <typename W>
void UnembedWidth(const MatmulArgs& a) {
  const int64_t step = a.rows <= 8 ? a.end - a.begin : kTableNear;
  for (int64_t begin = a.begin; begin < a.end; begin += step) {
    const int64_t end = std::min(a.end, begin + step);
    int64_t row = 0;
    for (; row + 8 <= a.rows; row += 8) UnembedSome<8, 2, W>(a, row, begin, end);
    UnembedLast<W>(a, row, begin, end);
  }
}

void Unembed(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? UnembedWidth<float>(a) : UnembedWidth<uint16_t>(a);
}
