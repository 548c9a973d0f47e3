// Attention of bfloat16 by tiles of AMX. Part of kernels_impl.h.
//
// A score is summed over head_dim in blocks of 32, an output over the slots of a table in blocks of 32, in the
// order of the tile instruction. What a query does not see has a share of zero, so its result depends on
// neither the queries that share the pass nor on chunk, batch or block table. Shares meet V in bfloat16.

constexpr int64_t kTileOfFloats = kTileHeight * kTileBytes / 4;
constexpr int64_t kValueBlocks = 8;  // blocks of V that are laid out at a time, and stay near

// The rows of a pool at the 32 slots from `slot` on; outside [begin, end) `zeros`, where no block is looked up.
struct SlotRows {
  const uint16_t* at[kSlotBlock];

  SlotRows(const AttendArgs& a, const void* pool, int64_t slot, int64_t begin, int64_t end, const uint16_t* zeros) {
    std::fill(at, at + kSlotBlock, zeros);
    const int64_t first = std::max(slot, begin), last = std::min(slot + kSlotBlock, end);
    for (int64_t next = first; next < last;) {
      const int64_t block = next / a.block_size, offset = next - block * a.block_size;
      const int64_t count = std::min(last - next, a.block_size - offset);
      const auto* row = static_cast<const uint16_t*>(pool) + a.table[block] * a.block_stride + offset * a.head_dim;
      for (int64_t i = 0; i < count; ++i, row += a.head_dim) at[next - slot + i] = row;
      next += count;
    }
  }

  void Ask(int64_t head_dim) const {
    for (const uint16_t* row : at) Prefetch(reinterpret_cast<const uint8_t*>(row), (head_dim * 2 + 63) / 64);
  }
};

// Inputs [d, d + 32) of sixteen keys as a tile that queries are multiplied by: pairs of inputs [16, keys, 2].
inline void KeyTile(const uint16_t* const* rows, int64_t d, float* tile) {
  Transpose([&](int key) { return Load<F16>(rows[key] + d); },
            [&](int line, F16 pairs) { Store(tile + line * kLanes, pairs); });
}

// Inputs [d, d + 16) of 32 values as a tile that shares are multiplied by: pairs of slots [16, inputs, 2].
inline void ValueTile(const uint16_t* const* rows, int64_t d, float* tile) {
  for (int64_t i = 0; i < kSlotBlock / 2; ++i) {
    Store(tile + i * kLanes, LoadLanes(rows[2 * i] + d) | LoadLanes(rows[2 * i + 1] + d) << 16);
  }
}

// Up to two tiles of queries that share a K/V head, and the slots [begin, end) that one of them sees.
struct TiledQueries {
  const AttendArgs& a;
  int64_t begin, end, from, blocks, counts[2];  // blocks of slots, the first at `from`
  const uint16_t* zeros;

  // kSums + 2 t + i += tile t of rows, times the weights of tile i.
  void Add(const void* rows, int64_t stride, const float* weights, const float* second) const {
    LoadTile<kWeights>(weights, kTileBytes);
    LoadTile<kWeights + 1>(second, kTileBytes);
    LoadTile<kRows>(rows, stride);
    AddBfloat16<kSums, kRows, kWeights>();
    AddBfloat16<kSums + 1, kRows, kWeights + 1>();
    if (counts[1] == 0) return;
    LoadTile<kRows + 1>(static_cast<const char*>(rows) + kTileHeight * stride, stride);
    AddBfloat16<kSums + 2, kRows + 1, kWeights>();
    AddBfloat16<kSums + 3, kRows + 1, kWeights + 1>();
  }

  // scores[n, slot - from] = q . k
  void Scores(float* tiles) const {
    const int64_t parts = a.head_dim / kTermBlock, stride = a.span * 4;
    SlotRows rows(a, a.k, from, begin, end, zeros);
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t i = 0; i < 2 * parts; ++i) {
        KeyTile(rows.at + i % 2 * kTileHeight, i / 2 * kTermBlock, tiles + i * kTileOfFloats);
      }
      rows = SlotRows(a, a.k, from + (block + 1) * kSlotBlock, begin, end, zeros);
      rows.Ask(a.head_dim);
      ZeroTile<kSums>();
      ZeroTile<kSums + 1>();
      ZeroTile<kSums + 2>();
      ZeroTile<kSums + 3>();
      for (int64_t part = 0; part < parts; ++part) {
        const float* keys = tiles + 2 * part * kTileOfFloats;
        Add(a.halves + part * kTermBlock, a.head_dim * 2, keys, keys + kTileOfFloats);
      }
      float* to = a.scores + block * kSlotBlock;
      StoreTile<kSums>(to, stride);
      StoreTile<kSums + 1>(to + kLanes, stride);
      if (counts[1] == 0) continue;
      StoreTile<kSums + 2>(to + kTileHeight * a.span, stride);
      StoreTile<kSums + 3>(to + kTileHeight * a.span + kLanes, stride);
    }
  }

  // The shares of query n, in bfloat16 where its scores began.
  void Shares(int64_t n) const {
    const Query& query = a.queries[n];
    float *line = a.scores + n * a.span, *visible = line + (query.first - from);
    const int64_t count = query.last - query.first;
    Adjust(visible, count, a.scale, a.cap, query.bias);
    Softmax(visible, count, query.sink);
    std::fill(line, visible, 0.0f);
    std::fill(visible + count, line + blocks * kSlotBlock, 0.0f);
    auto* to = reinterpret_cast<uint16_t*>(line);
    for (int64_t i = 0; i < blocks * kSlotBlock; i += kLanes) {
      Store(to + i, ToBfloat16(Load<F16>(line + i)));
    }
  }

  // sums[d / 32, tile of queries, half, 16, 16] = shares times V
  void Outputs(float* tiles, float* sums) const {
    std::fill(sums, sums + a.head_dim / kTermBlock * 4 * kTileOfFloats, 0.0f);
    for (int64_t block = 0; block < blocks; block += kValueBlocks) {
      const int64_t count = std::min(kValueBlocks, blocks - block), pairs = a.head_dim / kTermBlock;
      for (int64_t i = 0; i < count; ++i) {
        const SlotRows rows(a, a.v, from + (block + i) * kSlotBlock, begin, end, zeros);
        for (int64_t tile = 0; tile < 2 * pairs; ++tile) {
          ValueTile(rows.at, tile * kLanes, tiles + (i * 2 * pairs + tile) * kTileOfFloats);
        }
      }
      for (int64_t pair = 0; pair < pairs; ++pair) {
        float* four = sums + pair * 4 * kTileOfFloats;
        LoadTile<kSums>(four, kTileBytes);
        LoadTile<kSums + 1>(four + kTileOfFloats, kTileBytes);
        LoadTile<kSums + 2>(four + 2 * kTileOfFloats, kTileBytes);
        LoadTile<kSums + 3>(four + 3 * kTileOfFloats, kTileBytes);
        for (int64_t i = 0; i < count; ++i) {
          const float* values = tiles + (i * pairs + pair) * 2 * kTileOfFloats;
          const auto* shares = reinterpret_cast<const uint16_t*>(a.scores) + (block + i) * kSlotBlock;
          Add(shares, a.span * 4, values, values + kTileOfFloats);
        }
        StoreTile<kSums>(four, kTileBytes);
        StoreTile<kSums + 1>(four + kTileOfFloats, kTileBytes);
        StoreTile<kSums + 2>(four + 2 * kTileOfFloats, kTileBytes);
        StoreTile<kSums + 3>(four + 3 * kTileOfFloats, kTileBytes);
      }
    }
  }
};

void AttendByTiles(const AttendArgs& a) {
  int64_t begin = a.queries[0].first, end = a.queries[0].last;
  for (int64_t n = 1; n < a.count; ++n) {
    begin = std::min(begin, a.queries[n].first);
    end = std::max(end, a.queries[n].last);
  }
  if (begin == end) {  // none of them sees anything, and there are no scores
    for (int64_t n = 0; n < a.count; ++n) std::fill(a.queries[n].out, a.queries[n].out + a.head_dim, 0.0f);
    return;
  }
  const int64_t from = begin / kSlotBlock * kSlotBlock, parts = a.head_dim / kTermBlock;
  const int64_t blocks = (end - from + kSlotBlock - 1) / kSlotBlock;
  static thread_local Lines scratch;
  const int64_t laid_out = kValueBlocks * 2 * parts * kTileOfFloats, summed = 4 * parts * kTileOfFloats;
  float* tiles = scratch.Of(laid_out + summed + a.head_dim / 2);
  float *sums = tiles + laid_out, *zeros = sums + summed;
  std::fill(zeros, zeros + a.head_dim / 2, 0.0f);
  const int64_t first = std::min(a.count, kTileHeight);
  const TiledQueries queries{a, begin, end, from, blocks, {first, a.count - first},
                             reinterpret_cast<const uint16_t*>(zeros)};
  {
    const ConfiguredTiles configured(ShapesOfFour(queries.counts));
    queries.Scores(tiles);
    for (int64_t n = 0; n < a.count; ++n) queries.Shares(n);
    queries.Outputs(tiles, sums);
  }
  for (int64_t n = 0; n < a.count; ++n) {
    const float* own = sums + (n / kTileHeight * 2 * kTileHeight + n % kTileHeight) * kLanes;
    for (int64_t d = 0; d < a.head_dim; d += kLanes) {
      const float* at = own + d / kTermBlock * 4 * kTileOfFloats + d % kTermBlock / kLanes * kTileOfFloats;
      Store(a.queries[n].out + d, Load<F16>(at));
    }
  }
}
