// Low-rank adapters: rows times A, and what of B they add up. Part of kernels_impl.h.
//
// Every sum is in the order of its inputs or ranks, whatever the number of rows.

constexpr int64_t kAdapterTile = kRegisters * 3 / 4;  // vectors of sums that fit into registers
constexpr int64_t kShrinkVectors = 3;  // of columns of A that meet a row together
constexpr int64_t kExpandRows = kAdapterTile < 8 ? kAdapterTile : 8;
constexpr int64_t kExpandBytes = 1 << 14;  // of B that all rows meet before the next
constexpr int64_t kAdapterAhead = 4096;  // bytes of A and of B that are fetched before they are needed
#define ROOFLAX_UNROLLED _Pragma("GCC unroll 16")

// M rows from `row` on and V vectors of columns from `n` on.
template <int64_t M, int64_t V, typename W>
void ShrinkTile(const ShrinkArgs& a, int64_t row, int64_t n) {
  const float* x[M];
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) x[m] = a.x[row + m];
  F16 sums[M][V];
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) {
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < V; ++i) sums[m][i] = F16{};
  }
  const W* from = static_cast<const W*>(a.a) + a.begin * a.width + n;
  for (int64_t k = a.begin; k < a.end; ++k, from += a.width) {
    F16 wide[V];
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < V; ++i) {
      __builtin_prefetch(reinterpret_cast<const char*>(from + i * kLanes) + kAdapterAhead);
      wide[i] = LoadWide(from + i * kLanes);
    }
    ROOFLAX_WHOLE
    for (int64_t m = 0; m < M; ++m) {
      ROOFLAX_WHOLE
      for (int64_t i = 0; i < V; ++i) sums[m][i] += x[m][k] * wide[i];
    }
  }
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) {
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < V; ++i) Store(a.sums + (row + m) * a.width + n + i * kLanes, sums[m][i]);
  }
}

template <int64_t M, int64_t V, typename W>
int64_t ShrinkRows(const ShrinkArgs& a, int64_t row, int64_t n) {
  if constexpr (M > 1) {
    if (a.rows - row < M) return ShrinkRows<M - 1, V, W>(a, row, n);
  }
  ShrinkTile<M, V, W>(a, row, n);
  return row + M;
}

template <int64_t V, typename W>
int64_t ShrinkColumns(const ShrinkArgs& a, int64_t n) {
  if constexpr (V > 1) {
    if (a.width - n < V * kLanes) return ShrinkColumns<V - 1, W>(a, n);
  }
  constexpr int64_t kMost = kAdapterTile / V;
  for (int64_t row = 0; row < a.rows;) row = ShrinkRows<(kMost < 1 ? 1 : kMost < 8 ? kMost : 8), V, W>(a, row, n);
  return n + V * kLanes;
}

void Shrink(const ShrinkArgs& a) {
  for (int64_t n = 0; n < a.width;) {
    n = a.half_weights ? ShrinkColumns<kShrinkVectors, uint16_t>(a, n) : ShrinkColumns<kShrinkVectors, float>(a, n);
  }
}

// y[row, panel] += sums, as far as the outputs go; of bfloat16 rounded to nearest even.
[[gnu::noinline]] void AddToOthers(const ExpandArgs& a, int64_t row, int64_t panel, const F16& sums) {
  const int64_t at = panel * kPanel, count = std::min(kPanel, a.outputs - at);
  if (a.half_sums) {
    auto* y = static_cast<uint16_t*>(a.y[row]) + a.first + at;
    return StoreSome(y, ToBfloat16(LoadSome(y, count) + sums), count);
  }
  float* y = static_cast<float*>(a.y[row]) + a.first + at;
  StoreSome(y, LoadSome(y, count) + sums, count);
}

// Panels [begin, end) of M rows from `row` on.
template <int64_t M, typename W>
void ExpandTile(const ExpandArgs& a, int64_t row, int64_t begin, int64_t end) {
  const float* few[M];
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) few[m] = a.few + (row + m) * a.stride;
  const W* from = static_cast<const W*>(a.b) + begin * a.rank * kPanel;
  for (int64_t panel = begin; panel < end; ++panel) {
    F16 sums[M];
    ROOFLAX_WHOLE
    for (int64_t m = 0; m < M; ++m) sums[m] = F16{};
    for (int64_t r = 0; r < a.rank; ++r, from += kPanel) {
      __builtin_prefetch(reinterpret_cast<const char*>(from) + kAdapterAhead);
      const F16 wide = LoadWide(from);
      ROOFLAX_WHOLE
      for (int64_t m = 0; m < M; ++m) sums[m] += few[m][r] * wide;
    }
    if (a.half_sums || (panel + 1) * kPanel > a.outputs) {
      ROOFLAX_UNROLLED
      for (int64_t m = 0; m < M; ++m) AddToOthers(a, row + m, panel, sums[m]);
    } else {
      ROOFLAX_UNROLLED
      for (int64_t m = 0; m < M; ++m) {
        float* y = static_cast<float*>(a.y[row + m]) + a.first + panel * kPanel;
        Store(y, Load<F16>(y) + sums[m]);
      }
    }
  }
}

template <int64_t M, typename W>
int64_t ExpandRows(const ExpandArgs& a, int64_t row, int64_t begin, int64_t end) {
  if constexpr (M > 1) {
    if (a.rows - row < M) return ExpandRows<M - 1, W>(a, row, begin, end);
  }
  ExpandTile<M, W>(a, row, begin, end);
  return row + M;
}

void Expand(const ExpandArgs& a) {
  const int64_t panel_bytes = std::max<int64_t>(1, a.rank) * kPanel * 4;
  const int64_t most = std::max<int64_t>(1, kExpandBytes / panel_bytes);
  for (int64_t begin = a.begin, end; begin < a.end; begin = end) {
    end = std::min(a.end, begin + most);
    for (int64_t row = 0; row < a.rows;) {
      row = a.half_weights ? ExpandRows<kExpandRows, uint16_t>(a, row, begin, end)
                           : ExpandRows<kExpandRows, float>(a, row, begin, end);
    }
  }
}
