// Matmuls of many rows, with weights of any format: by blocks, as floats. Part of kernels_impl.h.

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
// kBlockRows rows of x; a panel, which stays in the first cache, kNearRows of them, which stay in the second.
constexpr int64_t kBlockInner = 4096 / kColumns, kBlockPanels = 256 / kColumns;
constexpr int64_t kBlockRows = 512, kNearRows = 96;
static_assert(kBlockInner % kGroup == 0 && kNearRows % kTile == 0);

// A block of w, and sums of its panels and rows: of the parts that are done, and of the one under way.
struct BlockMemory {
  Lines packed, done, current;
};

// Inputs [begin, end): whether a part begins and ends with them, and whether that part is the first.
struct PartBlock {
  int64_t begin, end;
  bool first, last, first_part;
};

// A tile's vectors of sums: taken on from where the block before left them, and left for the next.
template <int64_t M>
void BlockTile(const float* x, int64_t inner, const PartBlock& block, const float* packed,
               float* current, float* done) {
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
      const float value = x[m * inner + k];
      ROOFLAX_WHOLE
      for (int64_t i = 0; i < kVectors; ++i) sums[m][i] += value * w[i];
    }
  }
  float* to = block.last ? done : current;
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
void BlockTileOf(int64_t count, const float* x, int64_t inner, const PartBlock& block,
                 const float* packed, float* current, float* done) {
  if constexpr (M > 1) {
    if (count < M) return BlockTileOf<M - 1>(count, x, inner, block, packed, current, done);
  }
  BlockTile<M>(x, inner, block, packed, current, done);
}

// Rows of x times a block of w.
inline void TilesOfBlock(const float* x, int64_t rows, int64_t inner, const PartBlock& block,
                         int64_t panels, const float* packed, float* current, float* done) {
  for (int64_t near = 0; near < rows; near += kNearRows) {
    const int64_t near_end = std::min(rows, near + kNearRows);
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t row = near; row < near_end; row += kTile) {
        const int64_t at = (panel * rows + row) * kColumns;
        BlockTileOf(std::min(kTile, near_end - row), x + row * inner + block.begin, inner, block,
                    packed + panel * kBlockInner * kColumns, current + at, done + at);
      }
    }
  }
}

// As `MultiplyMany`, for at most kBlockRows rows and kBlockPanels panels from `begin` on.
template <typename Pack, typename Emit>
void BlockOfOutputs(const float* x, int64_t rows, int64_t inner, int64_t part_length, int64_t begin,
                    int64_t panels, const Pack& pack, const Emit& emit) {
  static thread_local BlockMemory memory;
  float* packed = memory.packed.Of(panels * kBlockInner * kColumns);
  float* done = memory.done.Of(rows * panels * kColumns);
  float* current = memory.current.Of(rows * panels * kColumns);
  int64_t k = 0, k_end;
  do {  // once where there are no inputs
    const int64_t part = k / part_length * part_length, part_end = std::min(inner, part + part_length);
    k_end = std::min(part_end, k + kBlockInner);
    if (k < k_end) pack(begin, panels, k, k_end, packed);
    const PartBlock block{k, k_end, k == part, k_end == part_end, part == 0};
    TilesOfBlock(x, rows, inner, block, panels, packed, current, done);
    k = k_end;
  } while (k < inner);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t panel = 0; panel < panels; ++panel) {
      emit(row, begin + panel, done + (panel * rows + row) * kColumns);
    }
  }
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
