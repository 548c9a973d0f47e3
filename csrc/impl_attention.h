// Attention over blocks. Part of kernels_impl.h.
//
// A score is summed over head_dim in sixteen lanes, an output over the keys in their order, whoever
// else shares the pass: a query's result does not depend on chunk, batch or block table.

// Blocks that are fetched ahead, as no prefetcher of the processor's own follows a table; into the second cache,
// since the first allows fewer outstanding lines.
constexpr int64_t kBlocksAhead = 3;

// Runs each(i, slot, token) for the slots [begin, end) of a table: i counts from begin, `slot` is where
// its values begin in the pool, `token` where its scale lies. Values [d, d_end) are those that are read. Behind the
// last block come the first ones of the pool that will be read `then`.
template <typename W, typename Each>
inline void EachSlot(const AttendArgs& a, const W* pool, const W* then, int64_t begin, int64_t end, int64_t d,
                     int64_t d_end, const Each& each) {
  constexpr int64_t kInLine = 64 / static_cast<int64_t>(sizeof(W));
  const int64_t tokens_stride = a.block_stride / a.head_dim;
  const int64_t first_block = begin / a.block_size, blocks = (end - 1) / a.block_size + 1 - first_block;
  int64_t at = begin;
  while (at < end) {
    const int64_t block = at / a.block_size, offset = at - block * a.block_size;
    const int64_t count = std::min(end - at, a.block_size - offset);
    const int64_t first = a.table[block] * a.block_stride + offset * a.head_dim;
    const int64_t token = a.table[block] * tokens_stride + offset;
    const int64_t ahead = block - first_block + kBlocksAhead;
    const int64_t to = a.table[first_block + ahead % blocks] * a.block_stride;
    const W* next = (ahead < blocks ? pool : then) + to + offset * a.head_dim;
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = d; i < d_end; i += kInLine) __builtin_prefetch(next + j * a.head_dim + i, 0, 2);
      each(at - begin + j, first + j * a.head_dim, token + j);
    }
    at += count;
  }
}

// Queries that meet a key together.
constexpr int64_t kTogether = 4;

// Sums of queries with keys that registers hold; keys whose scores with N queries wait for each other, as many as a
// vector has lanes; and those of them that meet the queries together.
constexpr int64_t kHeldSums = kRegisters >= 32 ? kLanes : kRegisters / 2;
template <int64_t N>
constexpr int64_t kKeys = kLanes / N;
template <int64_t N>
constexpr int64_t kKeysTogether = std::max<int64_t>(1, kHeldSums / N);

// sums[n * kApart + i] = q[n, :count] * keys[i][:count], lane by lane, of N queries and I keys; `count` is
// whole vectors.
template <int64_t N, int64_t I, int64_t kApart, typename W>
ROOFLAX_INLINE void MultiplyKeys(const Query* queries, const W* const* keys, int64_t count, F16* sums) {
  F16 own[N][I];
  ROOFLAX_WHOLE
  for (auto& line : own) {
    ROOFLAX_WHOLE
    for (auto& sum : line) sum = F16{};
  }
  for (int64_t d = 0; d < count; d += kLanes) {
    F16 q[N];
    ROOFLAX_WHOLE
    for (int64_t n = 0; n < N; ++n) q[n] = Load<F16>(queries[n].q + d);
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < I; ++i) {
      const F16 wide = LoadWide(keys[i] + d);
      ROOFLAX_WHOLE
      for (int64_t n = 0; n < N; ++n) own[n][i] += q[n] * wide;
    }
  }
  ROOFLAX_WHOLE
  for (int64_t n = 0; n < N; ++n) {
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < I; ++i) sums[n * kApart + i] = own[n][i];
  }
}

// Scores of N queries over every slot that one of them sees. Keys wait until there are kKeys<N> of them, so
// that the lanes of their sums are added up together.
template <int64_t N, typename W>
[[gnu::noinline]] void Scores(const AttendArgs& a, int64_t begin, int64_t end) {
  static_assert(kKeys<N> % kKeysTogether<N> == 0);
  const auto* k = static_cast<const W*>(a.k);
  const int64_t whole = a.head_dim / kLanes * kLanes;
  const W* keys[kKeys<N>];
  alignas(64) float scales[kLanes] = {};
  int64_t waiting = 0, next = 0;
  const auto flush = [&] {
    std::fill(keys + waiting, keys + kKeys<N>, keys[0]);
    F16 sums[kLanes];
    ROOFLAX_WHOLE
    for (int64_t i = kKeys<N> * N; i < kLanes; ++i) sums[i] = F16{};
    for (int64_t i = 0; i < kKeys<N>; i += kKeysTogether<N>) {
      MultiplyKeys<N, kKeysTogether<N>, kKeys<N>>(a.queries, keys + i, whole, sums + i);
    }
    alignas(64) float total[kLanes];
    Store(total, SumEach(sums));
    for (int64_t i = 0; whole < a.head_dim && i < waiting * N; ++i) {
      const int64_t n = i / waiting, key = i % waiting;
      float& own = total[n * kKeys<N> + key];
      own = AddTail(own, a.queries[n].q, keys[key], whole, a.head_dim);
    }
    F16 factors = Broadcast(a.scale);
    if constexpr (sizeof(W) == 1) factors *= Load<F16>(scales);
    Store(total, Load<F16>(total) * factors);
    if (waiting == kKeys<N>) {  // as it mostly is: a length that the compiler knows
      ROOFLAX_WHOLE
      for (int64_t n = 0; n < N; ++n) std::memcpy(a.scores + n * a.span + next, total + n * kKeys<N>, kKeys<N> * 4);
    } else {
      for (int64_t n = 0; n < N; ++n) std::copy_n(total + n * kKeys<N>, waiting, a.scores + n * a.span + next);
    }
    next += waiting;
    waiting = 0;
  };
  EachSlot(a, k, static_cast<const W*>(a.v), begin, end, 0, a.head_dim, [&](int64_t, int64_t slot, int64_t token) {
    keys[waiting] = k + slot;
    if constexpr (sizeof(W) == 1) {
      for (int64_t n = 0; n < N; ++n) scales[n * kKeys<N> + waiting] = a.k_scale[token];
    }
    if (++waiting == kKeys<N>) flush();
  });
  if (waiting > 0) flush();
}

template <int64_t N>
struct SumsOf {
  F16 at[N];
};

// The sums over d = kLane, kLane + kStep, ... below `whole` of q[n][d] * keys[d], each in the order of Sum. Lanes are
// sixteen keys, which lie by columns [whole, 16].
template <int64_t N, int64_t kLane, int64_t kStep, typename T>
ROOFLAX_INLINE SumsOf<N> SumLanes(const float* const (&q)[N], const T* keys, int64_t whole) {
  SumsOf<N> sums;
  if constexpr (kStep == kLanes) {
    F16 own[N];
    ROOFLAX_WHOLE
    for (auto& sum : own) sum = F16{};
    for (int64_t d = kLane; d < whole; d += kLanes) {
      const F16 wide = LoadWide(keys + d * kLanes);
      ROOFLAX_WHOLE
      for (int64_t n = 0; n < N; ++n) own[n] += q[n][d] * wide;
    }
    ROOFLAX_WHOLE
    for (int64_t n = 0; n < N; ++n) sums.at[n] = own[n];
  } else {
    const SumsOf<N> even = SumLanes<N, kLane, 2 * kStep>(q, keys, whole);
    const SumsOf<N> odd = SumLanes<N, kLane + kStep, 2 * kStep>(q, keys, whole);
    ROOFLAX_WHOLE
    for (int64_t n = 0; n < N; ++n) sums.at[n] = even.at[n] + odd.at[n];
  }
  return sums;
}

// Scores [next, next + count) of the queries [n, n + N), or of those of them that there are.
template <int64_t N, typename T>
[[gnu::noinline]] void ScoresOfTransposed(const AttendArgs& a, int64_t n, const T* keys, F16 factors, int64_t next,
                                          int64_t count) {
  if constexpr (N > 1) {
    if (a.count - n < N) return ScoresOfTransposed<N - 1>(a, n, keys, factors, next, count);
  }
  const float* q[N];
  ROOFLAX_WHOLE
  for (int64_t i = 0; i < N; ++i) q[i] = a.queries[n + i].q;
  const int64_t whole = a.head_dim / kLanes * kLanes;
  SumsOf<N> sums = SumLanes<N, 0, 1>(q, keys, whole);
  for (int64_t d = whole; d < a.head_dim; ++d) {
    const F16 wide = LoadWide(keys + d * kLanes);
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < N; ++i) sums.at[i] += q[i][d] * wide;
  }
  ROOFLAX_WHOLE
  for (int64_t i = 0; i < N; ++i) {
    float* scores = a.scores + (n + i) * a.span + next;
    if (count == kLanes) {
      Store(scores, sums.at[i] * factors);
    } else {
      float last[kLanes];
      Store(last, sums.at[i] * factors);
      std::copy_n(last, count, scores);
    }
  }
}

// Sixteen keys [head_dim] by columns, in two bytes a number where they are so in the pool.
template <typename W>
auto TransposedKeys(const AttendArgs& a, const W* const* keys) {
  constexpr bool kWords = sizeof(W) == 2;
  using T = std::conditional_t<kWords, W, float>;
  auto* to = static_cast<T*>(a.keys);
  int64_t d = 0;
  for (; d + kLanes <= a.head_dim; d += kLanes) {
    if constexpr (kWords) {
      const uint16_t* rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) rows[i] = reinterpret_cast<const uint16_t*>(keys[i] + d);
      TransposeWords(rows, reinterpret_cast<uint16_t*>(to + d * kLanes));
    } else {
      Transpose([&](int i) { return LoadWide(keys[i] + d); },
                [&](int i, F16 lane) { Store(to + (d + i) * kLanes, lane); });
    }
  }
  for (; d < a.head_dim; ++d) {
    for (int64_t i = 0; i < kLanes; ++i) {
      if constexpr (kWords) {
        to[d * kLanes + i] = keys[i][d];
      } else {
        to[d * kLanes + i] = Widen(keys[i][d]);
      }
    }
  }
  return static_cast<const T*>(to);
}

// The scores of Scores, of more queries: sixteen keys at a time are transposed once for all.
template <typename W>
[[gnu::noinline]] void ScoresOfMany(const AttendArgs& a, int64_t begin, int64_t end) {
  static_assert(kKeysAtOnce == kLanes);
  const auto* k = static_cast<const W*>(a.k);
  float scales[kLanes] = {};
  const W* keys[kLanes];
  int64_t waiting = 0, next = 0;
  const auto flush = [&] {
    std::fill(keys + waiting, keys + kLanes, keys[0]);
    const auto* transposed = TransposedKeys<W>(a, keys);
    F16 factors = Broadcast(a.scale);
    if constexpr (sizeof(W) == 1) factors *= Load<F16>(scales);
    for (int64_t n = 0; n < a.count; n += kTogether) {
      ScoresOfTransposed<kTogether>(a, n, transposed, factors, next, waiting);
    }
    next += waiting;
    waiting = 0;
  };
  EachSlot(a, k, static_cast<const W*>(a.v), begin, end, 0, a.head_dim, [&](int64_t, int64_t slot, int64_t token) {
    keys[waiting] = k + slot;
    if constexpr (sizeof(W) == 1) scales[waiting] = a.k_scale[token];
    if (++waiting == kLanes) flush();
  });
  if (waiting > 0) flush();
}

// Outputs [d, d + H vectors) of N queries.
template <int64_t N, int64_t H, typename W>
ROOFLAX_INLINE void OutputsAt(const AttendArgs& a, const Query* queries, const float* shares, int64_t begin,
                              int64_t end, int64_t d) {
  const auto* v = static_cast<const W*>(a.v);
  const auto* next_head = static_cast<const W*>(a.k) + a.block_size * a.head_dim;
  F16 sums[N][H];
  ROOFLAX_WHOLE
  for (auto& line : sums) {
    ROOFLAX_WHOLE
    for (auto& sum : line) sum = F16{};
  }
  EachSlot(a, v, next_head, begin, end, d, d + H * kLanes, [&](int64_t i, int64_t slot, int64_t token) {
    float share[N];
    ROOFLAX_WHOLE
    for (int64_t n = 0; n < N; ++n) {
      share[n] = shares[n * a.span + i];
      if constexpr (sizeof(W) == 1) share[n] *= a.v_scale[token];
    }
    ROOFLAX_WHOLE
    for (int64_t h = 0; h < H; ++h) {
      const F16 wide = LoadWide(v + slot + d + h * kLanes);
      ROOFLAX_WHOLE
      for (int64_t n = 0; n < N; ++n) sums[n][h] += share[n] * wide;
    }
  });
  ROOFLAX_WHOLE
  for (int64_t n = 0; n < N; ++n) {
    ROOFLAX_WHOLE
    for (int64_t h = 0; h < H; ++h) Store(queries[n].out + d + h * kLanes, sums[n][h]);
  }
}

// Outputs of N queries, as many vectors at once as registers have room for.
template <int64_t N, typename W>
[[gnu::noinline]] void Outputs(const AttendArgs& a, const Query* queries, const float* shares, int64_t begin,
                               int64_t end) {
  constexpr int64_t kHeld = 4 * N < kRegisters ? 4 : 2 * N < kRegisters ? 2 : 1;  // and one for what is loaded
  const auto* v = static_cast<const W*>(a.v);
  const auto* next_head = static_cast<const W*>(a.k) + a.block_size * a.head_dim;
  const int64_t whole = a.head_dim / kLanes * kLanes;
  int64_t d = 0;
  for (; d + kHeld * kLanes <= whole; d += kHeld * kLanes) {
    OutputsAt<N, kHeld, W>(a, queries, shares, begin, end, d);
  }
  for (; d < whole; d += kLanes) OutputsAt<N, 1, W>(a, queries, shares, begin, end, d);
  for (; d < a.head_dim; ++d) {
    float sums[N] = {};
    EachSlot(a, v, next_head, begin, end, d, d + 1, [&](int64_t i, int64_t slot, int64_t token) {
      float wide = Widen(v[slot + d]);
      if constexpr (sizeof(W) == 1) wide *= a.v_scale[token];
      for (int64_t n = 0; n < N; ++n) sums[n] += shares[n * a.span + i] * wide;
    });
    for (int64_t n = 0; n < N; ++n) queries[n].out[d] = sums[n];
  }
}

template <typename W>
void AttendWidth(const AttendArgs& a) {
  int64_t begin = a.queries[0].first, end = a.queries[0].last;
  for (int64_t n = 1; n < a.count; ++n) {
    begin = std::min(begin, a.queries[n].first);
    end = std::max(end, a.queries[n].last);
  }
  switch (a.count) {
    case 1: Scores<1, W>(a, begin, end); break;
    case 2: Scores<2, W>(a, begin, end); break;
    case 3: Scores<3, W>(a, begin, end); break;
    case 4: Scores<4, W>(a, begin, end); break;
    default: ScoresOfMany<W>(a, begin, end);
  }
  for (int64_t n = 0; n < a.count; ++n) {
    const Query& query = a.queries[n];
    float* line = a.scores + n * a.span;
    std::fill(line, line + (query.first - begin), 0.0f);  // what others see and this one does not
    std::fill(line + (query.last - begin), line + (end - begin), 0.0f);
    float* visible = line + (query.first - begin);
    const int64_t count = query.last - query.first;
    if (a.cap != 0.0f || query.bias != nullptr) Adjust(visible, count, 1.0f, a.cap, query.bias);
    Softmax(visible, count, query.sink);
  }
  for (int64_t n = 0; n < a.count; n += kTogether) {
    const float* shares = a.scores + n * a.span;
    switch (a.count - n) {
      case 1: Outputs<1, W>(a, a.queries + n, shares, begin, end); break;
      case 2: Outputs<2, W>(a, a.queries + n, shares, begin, end); break;
      case 3: Outputs<3, W>(a, a.queries + n, shares, begin, end); break;
      default: Outputs<4, W>(a, a.queries + n, shares, begin, end);
    }
  }
}

void Attend(const AttendArgs& a) {
  switch (a.width) {
    case Width::kFloat32: return AttendWidth<float>(a);
    case Width::kBfloat16: return AttendWidth<uint16_t>(a);
    case Width::kFloat16: return AttendWidth<Half>(a);
    case Width::kInt8: return AttendWidth<int8_t>(a);
    case Width::kFp8: return AttendWidth<E4m3>(a);
  }
}
