// Matmuls with bfloat16 in panels of pairs, of rows that are bfloat16 as well, by products of pairs (AVX512-BF16).
// Part of kernels_impl.h.
//
// An output is summed pair of inputs after pair, whatever the number of rows.

// sum and, in each lane, the products of both halves. What lacks the instruction, as tests do, rounds once more.
ROOFLAX_INLINE F16 AddPair(F16 sum, U16 w, uint32_t x) {
#if defined(__AVX512BF16__)
  const __m512i pair = _mm512_set1_epi32(static_cast<int>(x));
  return reinterpret_cast<F16>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(w),
                                                reinterpret_cast<__m512bh>(pair)));
#else
  const U16 pair = U16{} + x;
  sum += As<F16>(w & 0xffff0000u) * As<F16>(pair & 0xffff0000u);
  return sum + As<F16>(w << 16) * As<F16>(pair << 16);
#endif
}

// M rows of a tile of `height`, from its row `from` on, times P panels, each `apart` from the one before.
template <int64_t M, int64_t P>
void RowsByPairs(const MatmulArgs& a, int64_t tile, int64_t height, int64_t from, int64_t panel, int64_t apart) {
  const int64_t blocks = NumTermBlocks(a.inner), panel_bytes = blocks * kPairBlockBytes;
  const auto* w = static_cast<const uint8_t*>(a.w) + panel * panel_bytes;
  const uint16_t* x = TermsAt(a, tile, height, 0) + from * kTermBlock;
  F16 sums[P][M];
  for (auto& line : sums) {
    for (auto& sum : line) sum = F16{};
  }
  for (int64_t block = 0; block < blocks; ++block, x += height * kTermBlock, w += kPairBlockBytes) {
    for (int64_t i = 0; i < kTermBlock / 2; ++i) {
      U16 pairs[P];
      for (int64_t p = 0; p < P; ++p) {
        const uint8_t* line = w + p * apart * panel_bytes + i * 64;
        if constexpr (M == 1) __builtin_prefetch(line + kStreamAhead);
        pairs[p] = Load<U16>(line);
      }
      for (int64_t m = 0; m < M; ++m) {
        const auto both = Load<uint32_t>(x + m * kTermBlock + i * 2);
        for (int64_t p = 0; p < P; ++p) sums[p][m] = AddPair(sums[p][m], pairs[p], both);
      }
    }
  }
  for (int64_t p = 0; p < P; ++p) {
    for (int64_t m = 0; m < M; ++m) FinishPanel(a.out, tile + from + m, panel + p * apart, sums[p][m]);
  }
}

// The most rows at once, whose sums and those of two panels fit into registers.
constexpr int64_t kDotRows = 8;

// Panels [begin, end) of at most kDotRows rows, of which `count` are there.
template <int64_t M = kDotRows>
void PanelsByPairs(const MatmulArgs& a, int64_t tile, int64_t height, int64_t from, int64_t count, int64_t begin,
                   int64_t end) {
  if constexpr (M > 1) {
    if (count < M) return PanelsByPairs<M - 1>(a, tile, height, from, count, begin, end);
  }
  constexpr int64_t P = M <= 4 ? 4 : 2;
  int64_t panel = begin;
  for (; panel + P <= end; panel += P) RowsByPairs<M, P>(a, tile, height, from, panel, 1);
  for (; panel < end; ++panel) RowsByPairs<M, 1>(a, tile, height, from, panel, 1);
}

void PairsByDots(const MatmulArgs& a) {
  if (a.terms == nullptr || a.num_terms != 1 || a.inner == 0) {
    return __builtin_cpu_is("amd") ? avx512_far::kKernels.pairs(a) : avx512::kKernels.pairs(a);
  }
  if (a.rows == 1) {
    const int64_t turns = (a.end - a.begin) / kStreams;
    for (int64_t turn = 0; turn < turns; ++turn) RowsByPairs<1, kStreams>(a, 0, 1, 0, a.begin + turn, turns);
    for (int64_t panel = a.begin + turns * kStreams; panel < a.end; ++panel) RowsByPairs<1, 1>(a, 0, 1, 0, panel, 1);
    return;
  }
  constexpr int64_t kNear = 4;  // panels that stay in the second cache while all rows meet them
  for (int64_t begin = a.begin; begin < a.end; begin += kNear) {
    const int64_t end = std::min(a.end, begin + kNear);
    for (int64_t tile = 0; tile < a.rows; tile += kTiledRows) {
      const int64_t height = std::min(kTiledRows, a.rows - tile);
      for (int64_t from = 0; from < height; from += kDotRows) {
        PanelsByPairs(a, tile, height, from, std::min(kDotRows, height - from), begin, end);
      }
    }
  }
}
