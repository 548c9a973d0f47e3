// Rows in vectors and their softmax, where the sums of a matmul go, and memory for them. Part of kernels_impl.h.

// Runs each(i, lanes, count) over a row: whole vectors, then what is left with count < 16.
template <typename Each>
inline void EachVector(int64_t count, const Each& each) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) each(i, kLanes);
  if (i < count) each(i, count - i);
}

ROOFLAX_INLINE F16 LoadPadded(const float* from, int64_t count, float padding) {
  float lane[kLanes];
  std::fill(std::copy(from, from + count, lane), lane + kLanes, padding);
  return Load<F16>(lane);
}

ROOFLAX_INLINE F16 LoadSome(const float* from, int64_t count) {
  return count == kLanes ? Load<F16>(from) : LoadPadded(from, count, 0.0f);
}

// Of bfloat16, as float32.
ROOFLAX_INLINE F16 LoadSome(const uint16_t* from, int64_t count) {
  uint16_t some[kLanes] = {};
  if (count < kLanes) from = static_cast<const uint16_t*>(std::memcpy(some, from, static_cast<size_t>(2 * count)));
  return As<F16>(LoadLanes(from) << 16);
}

ROOFLAX_INLINE void StoreSome(uint16_t* to, H16 values, int64_t count) {
  std::memcpy(to, &values, static_cast<size_t>(2 * count));
}

ROOFLAX_INLINE void StoreSome(float* to, F16 values, int64_t count) {
  if (count == kLanes) return Store(to, values);
  float lane[kLanes];
  Store(lane, values);
  for (int64_t i = 0; i < count; ++i) to[i] = lane[i];
}

// scale * scores, then cap * tanh(score / cap) unless cap is 0, then what each gains of bias, which may be null.
inline void Adjust(float* scores, int64_t count, float scale, float cap, const float* bias) {
  EachVector(count, [&](int64_t i, int64_t n) {
    F16 score = LoadSome(scores + i, n) * scale;
    if (cap != 0.0f) score = Tanh(score / cap) * cap;
    if (bias != nullptr) score += LoadSome(bias + i, n);
    StoreSome(scores + i, score, n);
  });
}

// Scores of one query to shares that add up to 1 with the sink's; NaN stays NaN.
inline void Softmax(float* scores, int64_t count, const float* sink) {
  F16 highest = Broadcast(sink ? *sink : -3.0e38f);
  EachVector(count, [&](int64_t i, int64_t n) {
    const F16 values = n == kLanes ? Load<F16>(scores + i) : LoadPadded(scores + i, n, -3.0e38f);
    highest = Select(values > highest, values, highest);
  });
  const float most = Largest(highest);
  F16 totals = F16{};
  EachVector(count, [&](int64_t i, int64_t n) {
    const F16 values = n == kLanes ? Load<F16>(scores + i) : LoadPadded(scores + i, n, -INFINITY);
    const F16 shares = Select(values == values, Exp(values - most), values);
    totals += shares;
    StoreSome(scores + i, shares, n);
  });
  float total = Sum(totals);
  if (sink) {
    float lane[kLanes];
    Store(lane, Exp(Broadcast(*sink - most)));
    total += lane[0];
  }
  const float inverse = total > 0.0f ? 1.0f / total : total != total ? total : 0.0f;
  EachVector(count, [&](int64_t i, int64_t n) {
    StoreSome(scores + i, LoadSome(scores + i, n) * inverse, n);
  });
}

// Memory that begins at a multiple of a cache line, and grows as it has to.
struct Lines {
  std::vector<float> all;
  float* Of(int64_t count) {
    const auto size = static_cast<size_t>(count + kLanes);
    if (all.size() < size) all.resize(size);
    const auto at = reinterpret_cast<uintptr_t>(all.data()) / sizeof(float);
    return all.data() + (kLanes - at % kLanes) % kLanes;
  }
};

// Writes `count` sums of a row from column n on.
inline void Finish(const Output& out, int64_t row, int64_t n, int64_t count, const float* sums) {
  const float* bias = out.bias ? out.bias + n : nullptr;
  const int64_t at = row * out.outer + n;
  if (out.halves) {
    auto* y = static_cast<uint16_t*>(out.y) + at;
    const auto* residual = out.residual ? static_cast<const uint16_t*>(out.residual) + at : nullptr;
    return EachVector(count, [&](int64_t i, int64_t n) {
      F16 total = LoadSome(sums + i, n);
      if (bias) total += LoadSome(bias + i, n);
      if (residual) total += LoadSome(residual + i, n);
      StoreSome(y + i, ToBfloat16(total), n);
    });
  }
  float* y = static_cast<float*>(out.y) + at;
  const float* residual = out.residual ? static_cast<const float*>(out.residual) + at : nullptr;
  if (bias && residual) {
    for (int64_t i = 0; i < count; ++i) y[i] = sums[i] + bias[i] + residual[i];
  } else if (bias || residual) {
    const float* added = bias ? bias : residual;
    for (int64_t i = 0; i < count; ++i) y[i] = sums[i] + added[i];
  } else {
    std::copy(sums, sums + count, y);
  }
}

// A function of its own, so that sums of whole panels stay in registers.
[[gnu::noinline, gnu::cold]] void FinishPartOfPanel(const Output& out, int64_t row, int64_t n, const F16& sums) {
  float lane[kPanel];
  Store(lane, sums);
  Finish(out, row, n, out.outer - n, lane);
}

// Writes a panel's sums of a row, as far as the outputs go.
inline void FinishPanel(const Output& out, int64_t row, int64_t panel, F16 sums) {
  const int64_t n = panel * kPanel, at = row * out.outer + n;
#if defined(__aarch64__)
  KeepInRegister(sums);  // rounded, whatever they are a product of
#endif
  if (n + kPanel > out.outer) return FinishPartOfPanel(out, row, n, sums);
  if (out.bias) sums += Load<F16>(out.bias + n);
  if (out.halves) {
    if (out.residual) sums += LoadSome(static_cast<const uint16_t*>(out.residual) + at, kPanel);
    return Store(static_cast<uint16_t*>(out.y) + at, ToBfloat16(sums));
  }
  if (out.residual) sums += Load<F16>(static_cast<const float*>(out.residual) + at);
  Store(static_cast<float*>(out.y) + at, sums);
}
