// Matmuls with bfloat16 in panels of pairs, see kPairBlockBytes. Part of kernels_impl.h.
//
// Inputs of even and of odd numbers are summed apart, each in their order, whatever the number of rows.

constexpr int64_t kPairRows = kRegisters >= 32 ? 8 : kRegisters >= 8 ? 2 : 1;

template <int64_t M>
void PanelOfPairs(const MatmulArgs& a, int64_t row, int64_t panel) {
  const auto* w = static_cast<const uint8_t*>(a.w) + panel * NumTermBlocks(a.inner) * kPairBlockBytes;
  const float* x = a.x + row * a.inner;
  F16 even[M] = {}, odd[M] = {};
  for (int64_t k = 0; k < a.inner; k += 2, w += 64) {
    __builtin_prefetch(w + kStreamAhead);
    const U16 pair = Load<U16>(w);
    const F16 first = As<F16>(pair << 16), second = As<F16>(pair & 0xffff0000u);
    const bool both = k + 1 < a.inner;
    ROOFLAX_WHOLE
    for (int64_t m = 0; m < M; ++m) {
      even[m] += first * x[m * a.inner + k];
      if (both) odd[m] += second * x[m * a.inner + k + 1];
    }
  }
  for (int64_t m = 0; m < M; ++m) FinishPanel(a.out, row + m, panel, even[m] + odd[m]);
}

void Pairs(const MatmulArgs& a) {
  for (int64_t panel = a.begin; panel < a.end; ++panel) {
    int64_t row = 0;
    for (; row + kPairRows <= a.rows; row += kPairRows) PanelOfPairs<kPairRows>(a, row, panel);
    for (; row < a.rows; ++row) PanelOfPairs<1>(a, row, panel);
  }
}
