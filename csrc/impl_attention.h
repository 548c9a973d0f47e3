// Attention over blocks. Part of kernels_impl.h.
//
// A score is summed over head_dim in sixteen lanes, an output over the keys in their order, whoever
// else shares the pass: a query's result does not depend on chunk, batch or block table.

// Runs each(i, slot, token) for the slots [begin, end) of a table: i counts from begin, `slot` is where
// its values begin in the pool, `token` where its scale lies. The same place of
// the next block is on its way meanwhile: blocks lie anywhere, and no prefetcher of the processor's
// own follows a table. At the last block it is the first one of the pool that will be read `then`.
template <typename W, typename Each>
inline void EachSlot(const AttendArgs& a, const W* pool, const W* then, int64_t begin, int64_t end,
                     const Each& each) {
  const int64_t lines = (a.head_dim * static_cast<int64_t>(sizeof(W)) + 63) / 64;
  const int64_t tokens_stride = a.block_stride / a.head_dim;
  int64_t at = begin;
  while (at < end) {
    const int64_t block = at / a.block_size, offset = at - block * a.block_size;
    const int64_t count = std::min(end - at, a.block_size - offset);
    const int64_t first = a.table[block] * a.block_stride + offset * a.head_dim;
    const int64_t token = a.table[block] * tokens_stride + offset;
    const bool more = at + count < end;
    const int64_t to = a.table[more ? block + 1 : begin / a.block_size] * a.block_stride;
    const W* next = (more ? pool : then) + to + offset * a.head_dim;
    for (int64_t j = 0; j < count; ++j) {
      Prefetch(reinterpret_cast<const uint8_t*>(next + j * a.head_dim), lines);
      each(at - begin + j, first + j * a.head_dim, token + j);
    }
    at += count;
  }
}

// Queries whose sums with a key registers hold.
constexpr int64_t kKeyQueries = kRegisters < 32 ? kRegisters / 2 : 8;

// sums[n] = q[n, :count] * key[:count], lane by lane, for N queries; `count` is whole vectors.
template <int64_t N, typename W>
ROOFLAX_INLINE void MultiplyKey(const Query* queries, const W* key, int64_t count, F16* sums) {
  constexpr int64_t kFirst = Evenly(N, kKeyQueries);
  F16 own[kFirst];
  ROOFLAX_WHOLE
  for (auto& sum : own) sum = F16{};
  for (int64_t d = 0; d < count; d += kLanes) {
    const F16 wide = LoadWide(key + d);
    ROOFLAX_WHOLE
    for (int64_t n = 0; n < kFirst; ++n) own[n] += Load<F16>(queries[n].q + d) * wide;
  }
  ROOFLAX_WHOLE
  for (int64_t n = 0; n < kFirst; ++n) sums[n] = own[n];
  if constexpr (N > kFirst) {
    MultiplyKey<N - kFirst>(queries + kFirst, key, count, sums + kFirst);
  }
}

// Scores of N queries over every slot that one of them sees. The sums of some keys wait until they
// are sixteen, so that their lanes are added up together.
template <int64_t N, typename W>
void Scores(const AttendArgs& a, int64_t begin, int64_t end) {
  constexpr int64_t kKeys = kLanes / N;
  const auto* k = static_cast<const W*>(a.k);
  const int64_t whole = a.head_dim / kLanes * kLanes;
  F16 sums[kLanes] = {};
  float key_scales[kKeys] = {};
  int64_t slots[kKeys], waiting = 0, next = 0;
  const auto flush = [&] {
    float total[kLanes], factors[kLanes] = {};
    for (int64_t i = 0; i < kKeys * N; ++i) {
      factors[i] = sizeof(W) == 1 ? a.scale * key_scales[i / N] : a.scale;
    }
    Store(total, SumEach(sums));
    for (int64_t i = 0; whole < a.head_dim && i < waiting * N; ++i) {
      total[i] = AddTail(total[i], a.queries[i % N].q, k + slots[i / N], whole, a.head_dim);
    }
    Store(total, Load<F16>(total) * Load<F16>(factors));
    const auto store = [&](int64_t i) { a.scores[i % N * a.span + next + i / N] = total[i]; };
    if (waiting == kKeys) {  // as it mostly is: a length that the compiler knows
      ROOFLAX_WHOLE
      for (int64_t i = 0; i < kKeys * N; ++i) store(i);
    } else {
      for (int64_t i = 0; i < waiting * N; ++i) store(i);
    }
    next += waiting;
    waiting = 0;
  };
  EachSlot(a, k, static_cast<const W*>(a.v), begin, end,
           [&](int64_t, int64_t slot, int64_t token) {
    MultiplyKey<N>(a.queries, k + slot, whole, sums + waiting * N);
    slots[waiting] = slot;
    if constexpr (sizeof(W) == 1) key_scales[waiting] = a.k_scale[token];
    if (++waiting == kKeys) flush();
  });
  flush();
}

// Outputs of N queries, sixteen lanes times kHeld at once, as registers have room.
template <int64_t N, typename W>
void Outputs(const AttendArgs& a, const Query* queries, const float* shares, int64_t begin,
             int64_t end) {
  constexpr int64_t kHeld = 4 * N <= kRegisters ? 4 : 1;
  const auto* v = static_cast<const W*>(a.v);
  const auto* next_head = static_cast<const W*>(a.k) + a.block_size * a.head_dim;
  const int64_t whole = a.head_dim / kLanes * kLanes;
  for (int64_t d = 0; d < whole; d += kHeld * kLanes) {
    const int64_t held = std::min(kHeld, (whole - d) / kLanes);
    F16 sums[N][kHeld] = {};
    EachSlot(a, v, next_head, begin, end, [&](int64_t i, int64_t slot, int64_t token) {
      float share[N];
      for (int64_t n = 0; n < N; ++n) {
        share[n] = shares[n * a.span + i];
        if constexpr (sizeof(W) == 1) share[n] *= a.v_scale[token];
      }
      for (int64_t h = 0; h < kHeld; ++h) {
        if (h >= held) continue;
        const F16 wide = LoadWide(v + slot + d + h * kLanes);
        for (int64_t n = 0; n < N; ++n) sums[n][h] += share[n] * wide;
      }
    });
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t h = 0; h < held; ++h) Store(queries[n].out + d + h * kLanes, sums[n][h]);
    }
  }
  for (int64_t d = whole; d < a.head_dim; ++d) {
    float sums[N] = {};
    EachSlot(a, v, next_head, begin, end, [&](int64_t i, int64_t slot, int64_t token) {
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
    case 5: Scores<5, W>(a, begin, end); break;
    case 6: Scores<6, W>(a, begin, end); break;
    case 7: Scores<7, W>(a, begin, end); break;
    default: Scores<8, W>(a, begin, end);
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
  int64_t n = 0;
  for (; n + 4 <= a.count; n += 4) {
    Outputs<4, W>(a, a.queries + n, a.scores + n * a.span, begin, end);
  }
  for (; n < a.count; ++n) Outputs<1, W>(a, a.queries + n, a.scores + n * a.span, begin, end);
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
