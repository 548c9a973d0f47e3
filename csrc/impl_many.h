// Matmuls of many rows, with weights of any format: by blocks, as floats. Part of kernels_impl.h.

// Rows in the first of as few turns as `most` at a time allows, all of about the same length.
constexpr int64_t Evenly(int64_t rows, int64_t most) {
  const int64_t turns = (rows + most - 1) / most;
  return (rows + turns - 1) / turns;
}

// Rows of x and vectors of columns in a tile, whose sums fit into registers.
#if defined(__AVX512F__)
constexpr int64_t kTile = 12, kVectors = 2;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int64_t kTile = 6, kVectors = 1;
#else
constexpr int64_t kTile = 3, kVectors = 1;
#endif
constexpr int64_t kColumns = kVectors * kLanes;

// A block of w, kBlockInner inputs by kBlockPanels panels of kColumns columns, is packed at a time and meets
// kBlockRows rows of x. They are copied, kNearRows at a time, to lie beside each other: rows of x are often a
// multiple of 1024 bytes long, so that those of a tile would share a cache's sets.
constexpr int64_t kBlockInner = 256, kBlockPanels = 16;
constexpr int64_t kBlockRows = 512, kNearRows = 96;
constexpr int64_t kCopyAhead = 4;  // rows of x that are fetched before they are copied
static_assert(kBlockInner % kGroup == 0 && kNearRows % kTile == 0);

// A block of w, rows of x that meet it, and sums of its panels and rows: of the parts that are done, and of the
// one under way.
struct BlockMemory {
  Lines packed, near, done, current;

  static BlockMemory& OfThread() {
    static thread_local BlockMemory memory;
    return memory;
  }
};

// Inputs [begin, end): whether a part begins and ends with them, whether that part is the first, and whether they
// are the last of all.
struct PartBlock {
  int64_t begin, end;
  bool first, last, first_part, last_part;
};

// A tile's vectors of sums: taken on from where the block before left them, and left for the next, or in `out`
// where no inputs are left.
template <int64_t M>
void BlockTile(const float* x, const PartBlock& block, const float* packed, float* current, float* done, float* out) {
  F16 sums[M][kVectors];
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) {
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < kVectors; ++i) {
      sums[m][i] = block.first ? F16{} : Load<F16>(current + m * kColumns + i * kLanes);
    }
  }
  for (int64_t k = 0; k < block.end - block.begin; ++k) {
    F16 w[kVectors];
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < kVectors; ++i) w[i] = Load<F16>(packed + k * kColumns + i * kLanes);
    ROOFLAX_WHOLE
    for (int64_t m = 0; m < M; ++m) {
      const float value = x[m * kBlockInner + k];
      ROOFLAX_WHOLE
      for (int64_t i = 0; i < kVectors; ++i) sums[m][i] += value * w[i];
    }
  }
  float* to = block.last_part ? out : block.last ? done : current;
  ROOFLAX_WHOLE
  for (int64_t m = 0; m < M; ++m) {
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < kVectors; ++i) {
      const int64_t at = m * kColumns + i * kLanes;
      if (block.last && !block.first_part) sums[m][i] = Load<F16>(done + at) + sums[m][i];
      Store(to + at, sums[m][i]);
    }
  }
}

// At most a tile of rows, of which `count` are there.
template <int64_t M = kTile>
void BlockTileOf(int64_t count, const float* x, const PartBlock& block, const float* packed, float* current,
                 float* done, float* out) {
  if constexpr (M > 1) {
    if (count < M) return BlockTileOf<M - 1>(count, x, block, packed, current, done, out);
  }
  BlockTile<M>(x, block, packed, current, done, out);
}

// Rows of x times a block of w. `near` holds kNearRows of them; emit(row, panel, sums) takes what is finished.
template <typename Emit>
void TilesOfBlock(const float* x, int64_t rows, int64_t inner, const PartBlock& block, int64_t panels,
                  const float* packed, float* near, float* current, float* done, const Emit& emit) {
  for (int64_t begin = 0; begin < rows; begin += kNearRows) {
    const int64_t end = std::min(rows, begin + kNearRows);
    for (int64_t row = begin; row < end; ++row) {
      const float* line = x + row * inner;
      for (int64_t k = block.begin; k < block.end; k += kLanes) __builtin_prefetch(line + kCopyAhead * inner + k);
      std::copy(line + block.begin, line + block.end, near + (row - begin) * kBlockInner);
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t row = begin; row < end; row += kTile) {
        const int64_t at = (panel * rows + row) * kColumns, count = std::min(kTile, end - row);
        alignas(64) float out[kTile * kColumns];
        BlockTileOf(count, near + (row - begin) * kBlockInner, block, packed + panel * kBlockInner * kColumns,
                    current + at, done + at, out);
        for (int64_t m = 0; block.last_part && m < count; ++m) emit(row + m, panel, out + m * kColumns);
      }
    }
  }
}

// As `MultiplyMany`, for at most kBlockRows rows and kBlockPanels panels from `begin` on.
template <typename Pack, typename Emit>
void BlockOfOutputs(const float* x, int64_t rows, int64_t inner, int64_t part_length, int64_t begin,
                    int64_t panels, const Pack& pack, const Emit& emit) {
  BlockMemory& memory = BlockMemory::OfThread();
  const int64_t block_inner = (Evenly(part_length, kBlockInner) + kGroup - 1) / kGroup * kGroup;
  const int64_t sums = rows * panels * kColumns;
  float* packed = memory.packed.Of(panels * kBlockInner * kColumns);
  float* near = memory.near.Of(std::min(rows, kNearRows) * kBlockInner);
  float* done = memory.done.Of(inner > part_length ? sums : 0);
  float* current = memory.current.Of(part_length > block_inner ? sums : 0);
  int64_t k = 0, k_end;
  do {  // once where there are no inputs
    const int64_t part = k / part_length * part_length, part_end = std::min(inner, part + part_length);
    k_end = std::min(part_end, k + block_inner);
    if (k < k_end) pack(begin, panels, k, k_end, packed);
    const PartBlock block{k, k_end, k == part, k_end == part_end, part == 0, k_end == inner};
    TilesOfBlock(x, rows, inner, block, panels, packed, near, current, done,
                 [&](int64_t row, int64_t panel, const float* sums) { emit(row, begin + panel, sums); });
    k = k_end;
  } while (k < inner);
}

// x [rows, inner] times panels [begin, end) of w, summed in parts of the inputs. pack(panel, panels, k,
// k_end, to) gives inputs [k, k_end) of so many panels, each as [kBlockInner, kColumns]; emit(row,
// panel, sums) takes a row's kColumns sums.
template <typename Pack, typename Emit>
void MultiplyMany(const float* x, int64_t rows, int64_t inner, int64_t part_length,
                  int64_t begin, int64_t end, const Pack& pack, const Emit& emit) {
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const auto emit_row = [&](int64_t r, int64_t panel, const float* sums) {
      emit(row + r, panel, sums);
    };
    for (int64_t panel = begin; panel < end; panel += kBlockPanels) {
      BlockOfOutputs(x + row * inner, std::min(kBlockRows, rows - row), inner, part_length, panel,
                     std::min(kBlockPanels, end - panel), pack, emit_row);
    }
  }
}
