// Attention of whole sequences and its gradients, tile by tile. Part of kernels_impl.h.
//
// A tile is at most kWholeBlock queries of a head beside as many keys. Scores are made anew in the backward
// pass, from the logarithms of the softmax's sums. Every sum has one order, whoever computes it.

// c[m, n] = (add ? c[m, n] : 0) + sum over k of a[m, k] * b[k, n]; `columns` are whole vectors.
struct Products {
  const float* a;
  int64_t a_row, a_column;  // numbers from one to the next
  const float* b;
  int64_t b_row;
  float* c;
  int64_t c_row, rows, inner, columns;
  bool add;
};

// Vectors of columns whose sums are held at once, and rows beside them.
#if defined(__AVX512F__)
constexpr int64_t kProductVectors = 4;
#else
constexpr int64_t kProductVectors = 1;
#endif
constexpr int64_t ProductRows(int64_t vectors) {
  const int64_t rows = kRegisters * 3 / 4 / vectors;
  return rows < 12 ? rows : 12;
}

template <int64_t R, int64_t V>
void MultiplyRows(const Products& p, int64_t row, int64_t column) {
  F16 sums[R][V];
  float* c = p.c + row * p.c_row + column;
  _Pragma("GCC unroll 16") for (int64_t r = 0; r < R; ++r) {
    _Pragma("GCC unroll 4") for (int64_t v = 0; v < V; ++v) {
      sums[r][v] = p.add ? Load<F16>(c + r * p.c_row + v * kLanes) : F16{};
    }
  }
  const float *a = p.a + row * p.a_row, *b = p.b + column;
  for (int64_t k = 0; k < p.inner; ++k, a += p.a_column, b += p.b_row) {
    F16 w[V];
    _Pragma("GCC unroll 4") for (int64_t v = 0; v < V; ++v) w[v] = Load<F16>(b + v * kLanes);
    _Pragma("GCC unroll 16") for (int64_t r = 0; r < R; ++r) {
      const F16 x = F16{} + a[r * p.a_row];
      _Pragma("GCC unroll 4") for (int64_t v = 0; v < V; ++v) sums[r][v] += x * w[v];
    }
  }
  _Pragma("GCC unroll 16") for (int64_t r = 0; r < R; ++r) {
    _Pragma("GCC unroll 4") for (int64_t v = 0; v < V; ++v) {
      Store(c + r * p.c_row + v * kLanes, sums[r][v]);
    }
  }
}

// R rows or fewer.
template <int64_t R, int64_t V>
void MultiplyUpTo(const Products& p, int64_t count, int64_t row, int64_t column) {
  if constexpr (R > 1) {
    if (count < R) return MultiplyUpTo<R - 1, V>(p, count, row, column);
  }
  MultiplyRows<R, V>(p, row, column);
}

// Columns from `column` on, by V vectors and then by fewer.
template <int64_t V>
void MultiplyColumns(const Products& p, int64_t column) {
  for (; column + V * kLanes <= p.columns; column += V * kLanes) {
    constexpr int64_t kMost = ProductRows(V);
    int64_t turns = (p.rows + kMost - 1) / kMost;
    for (int64_t row = 0; row < p.rows; --turns) {  // all turns are about as long
      const int64_t count = (p.rows - row + turns - 1) / turns;
      MultiplyUpTo<kMost, V>(p, count, row, column);
      row += count;
    }
  }
  if constexpr (V > 1) MultiplyColumns<V / 2>(p, column);
}

void Multiply(const Products& p) { MultiplyColumns<kProductVectors>(p, 0); }

constexpr float kUnseen = -3.0e38f;

// y, or x where that is NaN.
ROOFLAX_INLINE F16 OrNan(F16 x, F16 y) { return Select(x == x, y, x); }

// Which of sixteen keys a query sees.
ROOFLAX_INLINE I16 Seen(const WholeArgs& a, int64_t query, int64_t key) {
  const I16 position = Load<I16>(a.positions + key);
  return (position > I16{} + a.low[query]) & (position <= I16{} + a.high[query]) &
         (Load<I16>(a.key_segments + key) == I16{} + a.segments[query]);
}

// A tile of scores, or of their gradients.
struct alignas(64) Tile {
  float at[kWholeBlock * kWholeBlock];
};

// sums[query, key] = x[query] . (column `key` of transposed)
inline void MultiplyKeys(const WholeArgs& a, const float* x, const float* transposed, int64_t first,
                         int64_t keys, Tile& sums) {
  Multiply({x, a.query_step, 1, transposed + first, a.key_step, sums.at, kWholeBlock, a.queries, a.head_dim,
            keys, false});
}

void Whole(const WholeArgs& a) {
  Tile tile;
  float highest[kWholeBlock], total[kWholeBlock];
  for (int64_t i = 0; i < a.queries; ++i) {
    highest[i] = a.sink ? *a.sink : kUnseen;
    total[i] = a.sink ? 1.0f : 0.0f;
    for (int64_t d = 0; d < a.head_dim; d += kLanes) Store(a.out + i * a.query_step + d, F16{});
  }
  for (int64_t first = 0; first < a.keys; first += kWholeBlock) {
    const Sight sight = a.sight[first / kWholeBlock];
    if (sight == Sight::kNothing) continue;
    const int64_t keys = std::min(kWholeBlock, a.keys - first);
    const int64_t filled = (keys + kLanes - 1) / kLanes * kLanes;
    MultiplyKeys(a, a.q, a.k_transposed, first, filled, tile);
    for (int64_t i = 0; i < a.queries; ++i) {
      float* scores = tile.at + i * kWholeBlock;
      F16 most = Broadcast(highest[i]);
      for (int64_t j = 0; j < filled; j += kLanes) {
        F16 values = Load<F16>(scores + j) * a.scale;
        if (sight == Sight::kSome) values = Select(Seen(a, i, first + j), values, Broadcast(kUnseen));
        most = Select(values > most, values, most);
        Store(scores + j, values);
      }
      const float now = Largest(most);
      F16 sums = F16{};
      for (int64_t j = 0; j < filled; j += kLanes) {
        const F16 less = Load<F16>(scores + j) - now;  // NaN also of scores and sinks beyond float32
        const F16 shares = OrNan(less, now > kUnseen ? Exp(less) : F16{});
        sums += shares;
        Store(scores + j, shares);
      }
      if (now > highest[i]) {
        const float kept = std::exp(highest[i] - now);
        total[i] *= kept;
        highest[i] = now;
        for (int64_t d = 0; d < a.head_dim; d += kLanes) {
          float* out = a.out + i * a.query_step + d;
          Store(out, Load<F16>(out) * kept);
        }
      }
      total[i] += Sum(sums);
    }
    Multiply({tile.at, kWholeBlock, 1, a.v + first * a.head_dim, a.head_dim, a.out, a.query_step, a.queries,
              keys, a.head_dim, true});
  }
  for (int64_t i = 0; i < a.queries; ++i) {
    const float inverse = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
    a.log_sums[i] = total[i] == 0.0f ? 0.0f : highest[i] + std::log(total[i]);
    for (int64_t d = 0; d < a.head_dim; d += kLanes) {
      float* out = a.out + i * a.query_step + d;
      Store(out, Load<F16>(out) * inverse);
    }
  }
}

// With P the shares and dP = dO V^T:  dS = P (dP - rows of dO . O);  dV += P^T dO;  dK += dS^T Q;  dQ = dS K.
void WholeBackward(const WholeArgs& a) {
  Tile shares, grads;
  float delta[kWholeBlock];
  for (int64_t i = 0; i < a.queries; ++i) {
    F16 sums = F16{};
    for (int64_t d = 0; d < a.head_dim; d += kLanes) {
      const int64_t at = i * a.query_step + d;
      sums += Load<F16>(a.d_out + at) * Load<F16>(a.out + at);
      Store(a.dq + at, F16{});
    }
    delta[i] = Sum(sums);
  }
  for (int64_t first = a.begin; first < a.end; first += kWholeBlock) {
    const Sight sight = a.sight[first / kWholeBlock];
    if (sight == Sight::kNothing) continue;
    const int64_t keys = std::min(kWholeBlock, a.keys - first);
    const int64_t filled = (keys + kLanes - 1) / kLanes * kLanes;
    MultiplyKeys(a, a.q, a.k_transposed, first, filled, shares);
    MultiplyKeys(a, a.d_out, a.v_transposed, first, filled, grads);
    for (int64_t i = 0; i < a.queries; ++i) {
      for (int64_t j = 0; j < filled; j += kLanes) {
        float *share = shares.at + i * kWholeBlock + j, *grad = grads.at + i * kWholeBlock + j;
        const F16 less = Load<F16>(share) * a.scale - a.log_sums[i];
        F16 own = OrNan(less, Exp(less));
        if (sight == Sight::kSome) own = Select(Seen(a, i, first + j), own, F16{});
        Store(share, own);
        Store(grad, own * (Load<F16>(grad) - delta[i]) * a.scale);
      }
    }
    float *dk = a.dk + first * a.head_dim, *dv = a.dv + first * a.head_dim;
    Multiply({shares.at, 1, kWholeBlock, a.d_out, a.query_step, dv, a.head_dim, keys, a.queries, a.head_dim, true});
    Multiply({grads.at, 1, kWholeBlock, a.q, a.query_step, dk, a.head_dim, keys, a.queries, a.head_dim, true});
    Multiply({grads.at, kWholeBlock, 1, a.k + first * a.head_dim, a.head_dim, a.dq, a.query_step, a.queries, keys,
              a.head_dim, true});
  }
}
