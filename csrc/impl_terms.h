// Rows of float32 as rows of bfloat16, see SplitArgs. Part of kernels_impl.h.

static_assert(kTermBlock == 32 && kMostTerms == 3);

// Sixteen numbers of a block as their terms.
template <int kTerms>
ROOFLAX_INLINE void TermsOf(F16 x, H16 (&terms)[kTerms]) {
  if constexpr (kTerms == 1) {
    terms[0] = ToBfloat16(x);
  } else {
    const auto high = [](F16 value) { return As<F16>(As<U16>(value) & 0xffff0000u); };
    const I16 finite = Abs(x) <= Broadcast(3.402823466e38f);
    F16 rest = x;
    for (auto& term : terms) {
      const F16 first = high(rest);
      term = LowHalves(As<U16>(first) >> 16);
      rest = Select(finite, rest - first, F16{});
    }
    // NaN stays NaN though its high bits may say otherwise.
    terms[0] = LowHalves(Select(x != x, As<U16>(x) | 0x400000u, As<U16>(x)) >> 16);
  }
}

template <int kTerms>
void SplitRow(const SplitArgs& a) {
  uint16_t* to = a.terms;
  for (int64_t k = 0; k < a.inner; k += kTermBlock, to += kTerms * a.rows * kTermBlock) {
    H16 terms[2][kTerms] = {};
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = k + half * kLanes, count = std::min(kLanes, a.inner - at);
      if (count > 0) TermsOf<kTerms>(LoadSome(a.x + at, count), terms[half]);
    }
    for (int term = 0; term < kTerms; ++term) {
      uint16_t* block = to + term * a.rows * kTermBlock;
      if (!a.table) {
        Store(block + a.row * kTermBlock, terms[0][term]);
        Store(block + a.row * kTermBlock + kLanes, terms[1][term]);
        continue;
      }
      uint32_t pairs[kTermBlock / 2];
      Store(pairs, terms[0][term]);
      Store(pairs + kLanes / 2, terms[1][term]);
      for (int64_t i = 0; i < kTermBlock / 2; ++i) Store(block + (i * a.rows + a.row) * 2, pairs[i]);
    }
  }
}

void SplitTerms(const SplitArgs& a) {
  a.num_terms == 1 ? SplitRow<1>(a) : SplitRow<kMostTerms>(a);
}

// Where the terms of rows [row, row + count) lie, of the block numbered `block`.
ROOFLAX_INLINE const uint16_t* TermsAt(const MatmulArgs& a, int64_t row, int64_t count, int64_t block) {
  return a.terms + (row * NumTermBlocks(a.inner) + block * count) * a.num_terms * kTermBlock;
}
