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

constexpr int64_t kAhead = 8;  // rows of w that are read at once
// What must be on its way: 100 ns of latency at 25 GB/s per core are 40 lines, and some more.
constexpr int64_t kBytesAhead = 6144;
#if defined(__AVX512F__)
constexpr int64_t kTile = 12;
#else
constexpr int64_t kTile = 4;
#endif

// Few rows: w streams past once, the sums of a stretch of columns stay in the first cache.
template <int64_t M, typename W>
void MatmulFew(const MatmulArgs& a, int64_t row) {
  constexpr int64_t kStretch = 4096 / (M <= 1 ? 2 : M) / kLanes * kLanes;
  const auto* w = static_cast<const W*>(a.w);
  const float* x = a.x + row * a.inner;
  alignas(64) float sums[M][kStretch];
  for (int64_t begin = a.begin; begin < a.end; begin += kStretch) {
    const int64_t width = std::min(kStretch, a.end - begin);
    const int64_t whole = width / kLanes * kLanes;
    const int64_t block_bytes = kAhead * width * static_cast<int64_t>(sizeof(W));
    const int64_t ahead = kAhead * std::max<int64_t>(1, kBytesAhead / block_bytes);
    for (auto& sum : sums) std::fill(sum, sum + width, 0.0f);
    for (int64_t k = 0; k < a.inner; k += kAhead) {
      const int64_t depth = std::min(kAhead, a.inner - k);
      const W* from = w + k * a.out.outer + begin;
      for (int64_t n = 0; n < whole; n += kLanes) {
        if (depth == kAhead) {
          F16 wide[kAhead];
          for (int64_t d = 0; d < kAhead; ++d) {
            const W* line = from + d * a.out.outer + n;
            if (n * sizeof(W) % 64 == 0) __builtin_prefetch(line + ahead * a.out.outer);
            wide[d] = LoadWide(line);
          }
          for (int64_t m = 0; m < M; ++m) {
            F16 sum = Load<F16>(sums[m] + n);
            for (int64_t d = 0; d < kAhead; ++d) sum += x[m * a.inner + k + d] * wide[d];
            Store(sums[m] + n, sum);
          }
        } else {
          for (int64_t d = 0; d < depth; ++d) {
            const F16 wide = LoadWide(from + d * a.out.outer + n);
            for (int64_t m = 0; m < M; ++m) {
              Store(sums[m] + n, Load<F16>(sums[m] + n) + x[m * a.inner + k + d] * wide);
            }
          }
        }
      }
      for (int64_t n = whole; n < width; ++n) {
        for (int64_t m = 0; m < M; ++m) {
          float sum = sums[m][n];
          for (int64_t d = 0; d < depth; ++d) {
            sum += x[m * a.inner + k + d] * Widen(from[d * a.out.outer + n]);
          }
          sums[m][n] = sum;
        }
      }
    }
    for (int64_t m = 0; m < M; ++m) {
      Finish(a.out, row + m, begin, width, sums[m]);
    }
  }
}

// One tile of rows times two vectors of columns that were packed as [inner, 32].
template <int64_t M>
void MatmulTile(const float* x, int64_t inner, const float* packed, F16 (&sums)[kTile][2]) {
  for (int64_t m = 0; m < M; ++m) sums[m][0] = sums[m][1] = F16{};
  for (int64_t k = 0; k < inner; ++k) {
    const F16 low = Load<F16>(packed + k * 32), high = Load<F16>(packed + k * 32 + 16);
    for (int64_t m = 0; m < M; ++m) {
      const float value = x[m * inner + k];
      sums[m][0] += value * low;
      sums[m][1] += value * high;
    }
  }
}

// The last rows, fewer than a tile: at most M.
template <int64_t M, typename Emit>
void LastRows(const float* x, int64_t begin, int64_t end, int64_t inner, const float* packed,
              const Emit& emit) {
  if constexpr (M > 0) {
    if (end - begin < M) return LastRows<M - 1>(x, begin, end, inner, packed, emit);
    F16 sums[kTile][2];
    MatmulTile<M>(x + begin * inner, inner, packed, sums);
    for (int64_t m = 0; m < M; ++m) emit(begin + m, sums[m]);
  }
}

// Every row of x times 32 packed columns; emit(row, its two vectors of sums).
template <typename Emit>
void TilesOfRows(const float* x, int64_t rows, int64_t inner, const float* packed,
                 const Emit& emit) {
  F16 sums[kTile][2];
  int64_t row = 0;
  for (; row + kTile <= rows; row += kTile) {
    MatmulTile<kTile>(x + row * inner, inner, packed, sums);
    for (int64_t m = 0; m < kTile; ++m) emit(row + m, sums[m]);
  }
  LastRows<kTile - 1>(x, row, rows, inner, packed, emit);
}

constexpr int64_t kPackAhead = 24;  // rows

// Many rows: 32 columns of w are packed once and meet every tile of rows.
template <typename W>
void MatmulMany(const MatmulArgs& a) {
  const auto* w = static_cast<const W*>(a.w);
  std::vector<float> packed(static_cast<size_t>(a.inner) * 32 + 16);
  for (int64_t n = a.begin; n < a.end; n += 32) {
    const int64_t width = std::min<int64_t>(32, a.end - n);
    for (int64_t k = 0; k < a.inner; ++k) {
      const W* from = w + k * a.out.outer + n;
      float* to = packed.data() + k * 32;
      for (int64_t i = 0; i < 32; i += 16) __builtin_prefetch(from + kPackAhead * a.out.outer + i);
      if (width == 32) {
        Store(to, LoadWide(from));
        Store(to + 16, LoadWide(from + 16));
      } else {
        for (int64_t i = 0; i < 32; ++i) to[i] = i < width ? Widen(from[i]) : 0.0f;
      }
    }
    TilesOfRows(a.x, a.rows, a.inner, packed.data(), [&](int64_t row, const F16* sums) {
      alignas(64) float line[32];
      Store(line, sums[0]);
      Store(line + 16, sums[1]);
      Finish(a.out, row, n, width, line);
    });
  }
}

constexpr int64_t kFew = 16;

template <int64_t M, typename W>
void MatmulOf(const MatmulArgs& a) {
  if (a.rows == M) return MatmulFew<M, W>(a, 0);
  if constexpr (M < kFew) return MatmulOf<M + 1, W>(a);
  MatmulMany<W>(a);
}

void Matmul(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? MatmulOf<1, float>(a) : MatmulOf<1, uint16_t>(a);
}

// ---- Products with a table, [outer, inner] ----

// At most sixteen sums, so that their lanes are added up together.
template <int64_t M, int64_t R, typename W>
void UnembedTile(const MatmulArgs& a, int64_t row, int64_t first) {
  static_assert(M * R <= kLanes);
  const W* table = static_cast<const W*>(a.w) + first * a.inner;
  const float* x = a.x + row * a.inner;
  F16 sums[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= a.inner; k += kLanes) {
    F16 values[M];
    for (int64_t m = 0; m < M; ++m) values[m] = Load<F16>(x + m * a.inner + k);
    for (int64_t r = 0; r < R; ++r) {
      const F16 wide = LoadWide(table + r * a.inner + k);
      for (int64_t m = 0; m < M; ++m) sums[m * R + r] += values[m] * wide;
    }
  }
  float total[kLanes];
  Store(total, SumEach(sums));
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t r = 0; r < R; ++r) {
      for (int64_t t = k; t < a.inner; ++t) {
        total[m * R + r] += x[m * a.inner + t] * Widen(table[r * a.inner + t]);
      }
    }
    Finish(a.out, row + m, first, R, total + m * R);
  }
}

template <int64_t M, int64_t R, typename W>
void UnembedRows(const MatmulArgs& a, int64_t row) {
  int64_t v = a.begin;
  for (; v + R <= a.end; v += R) UnembedTile<M, R, W>(a, row, v);
  for (; v < a.end; ++v) UnembedTile<M, 1, W>(a, row, v);
}

template <typename W>
void UnembedWidth(const MatmulArgs& a) {
  int64_t row = 0;
  for (; row + 8 <= a.rows; row += 8) UnembedRows<8, 2, W>(a, row);
  switch (a.rows - row) {
    case 1: return UnembedRows<1, 16, W>(a, row);
    case 2: return UnembedRows<2, 8, W>(a, row);
    case 3: return UnembedRows<3, 5, W>(a, row);
    case 4: return UnembedRows<4, 4, W>(a, row);
    case 5: return UnembedRows<5, 3, W>(a, row);
    case 6: return UnembedRows<6, 2, W>(a, row);
    case 7: return UnembedRows<7, 2, W>(a, row);
    default: return;
  }
}

void Unembed(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? UnembedWidth<float>(a) : UnembedWidth<uint16_t>(a);
}
