// Rows on their way into a matmul: normalised, activated, rotated; and the largest of one.
// Part of kernels_impl.h.

// ---- Norms ----

void RmsNorm(const BeforeArgs& a, const float* x, float* out) {
  F16 squares = F16{};
  EachVector(a.inner, [&](int64_t i, int64_t n) {
    const F16 value = LoadSome(x + i, n);
    squares += value * value;
  });
  const float scale = 1.0f / std::sqrt(Sum(squares) / static_cast<float>(a.inner) + a.eps);
  EachVector(a.inner, [&](int64_t i, int64_t n) {
    StoreSome(out + i, LoadSome(x + i, n) * scale * LoadSome(a.weight + i, n), n);
  });
}

void LayerNorm(const BeforeArgs& a, const float* x, float* out) {
  F16 total = F16{}, squares = F16{};
  EachVector(a.inner, [&](int64_t i, int64_t n) { total += LoadSome(x + i, n); });
  const float size = static_cast<float>(a.inner), mean = Sum(total) / size;
  EachVector(a.inner, [&](int64_t i, int64_t n) {
    const F16 centred = LoadSome(x + i, n) - mean;
    StoreSome(out + i, centred, n);
    const F16 counted = LoadSome(out + i, n);  // lanes that are not there are zero
    squares += counted * counted;
  });
  const float scale = 1.0f / std::sqrt(Sum(squares) / size + a.eps);
  EachVector(a.inner, [&](int64_t i, int64_t n) {
    const F16 scaled = LoadSome(out + i, n) * scale * LoadSome(a.weight + i, n);
    StoreSome(out + i, scaled + LoadSome(a.bias + i, n), n);
  });
}

// ---- Activations ----

ROOFLAX_INLINE F16 Sigmoid(F16 x) {
  const F16 small = Exp(-Abs(x)), one = Broadcast(1.0f);
  return Select(x >= F16{}, one, small) / (one + small);
}

// The error function to 1.5e-7 (Abramowitz and Stegun 7.1.26).
ROOFLAX_INLINE F16 Erf(F16 x) {
  const F16 size = Abs(x), t = 1.0f / (1.0f + 0.3275911f * size);
  F16 p = Broadcast(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const F16 found = 1.0f - p * t * Exp(-size * size);
  return Select(x >= F16{}, found, -found);
}

template <Before kKind>
ROOFLAX_INLINE F16 Activated(F16 x) {
  switch (kKind) {
    case Before::kSilu: return x * Sigmoid(x);
    case Before::kGelu: return 0.5f * x * (1.0f + Erf(x * 0.70710678f));
    case Before::kGeluTanh:
      return 0.5f * x * (1.0f + Tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    default: return Select(x != x, x, Select(x > F16{}, x, F16{}));
  }
}

template <Before kKind>
void Activate(const BeforeArgs& a, const float* x, float* out) {
  EachVector(a.inner, [&](int64_t i, int64_t n) {
    F16 value = Activated<kKind>(LoadSome(x + i, n));
    if (a.gated) value *= LoadSome(x + a.inner + i, n);
    StoreSome(out + i, value, n);
  });
}

void ClampedSwiglu(const BeforeArgs& a, const float* x, float* out) {
  const F16 high = Broadcast(a.limit), low = -high;
  EachVector(a.inner, [&](int64_t i, int64_t n) {
    F16 gate = LoadSome(x + i, n), up = LoadSome(x + a.inner + i, n);
    gate = Select(gate > high, high, gate);
    up = Select(up > high, high, Select(up < low, low, up));
    StoreSome(out + i, (up + 1.0f) * gate * Sigmoid(a.alpha * gate), n);
  });
}

void RunBefore(const BeforeArgs& a, const float* x, float* out) {
  switch (a.kind) {
    case Before::kRmsNorm: return RmsNorm(a, x, out);
    case Before::kLayerNorm: return LayerNorm(a, x, out);
    case Before::kSilu: return Activate<Before::kSilu>(a, x, out);
    case Before::kGelu: return Activate<Before::kGelu>(a, x, out);
    case Before::kGeluTanh: return Activate<Before::kGeluTanh>(a, x, out);
    case Before::kRelu: return Activate<Before::kRelu>(a, x, out);
    case Before::kClampedSwiglu: return ClampedSwiglu(a, x, out);
    case Before::kNone: std::copy(x, x + a.inner, out);
  }
}

// ---- As 16 bits ----

template <typename Convert>
inline void NarrowEach(const float* x, uint16_t* out, int64_t count, const Convert& convert) {
  EachVector(count, [&](int64_t i, int64_t n) {
    const H16 bits = convert(LoadSome(x + i, n));
    std::memcpy(out + i, &bits, static_cast<size_t>(n) * sizeof(uint16_t));
  });
}

[[gnu::flatten]] void Narrow(const float* x, void* out, int64_t count, Width width) {
  if (width == Width::kFloat32) {
    std::memcpy(out, x, static_cast<size_t>(count) * sizeof(float));
  } else if (width == Width::kBfloat16) {
    NarrowEach(x, static_cast<uint16_t*>(out), count, [](F16 values) { return ToBfloat16(values); });
  } else if (width == Width::kFloat16) {
    NarrowEach(x, static_cast<uint16_t*>(out), count, [](F16 values) { return ToHalf(values); });
  }
}

void Widen(const uint16_t* x, float* out, int64_t count) {
  EachVector(count, [&](int64_t i, int64_t n) { StoreSome(out + i, LoadSome(x + i, n), n); });
}

// ---- Rotated ----

// The sums and the differences of neighbours. After as many times as a place has bits, each bit has had its turn
// as the lowest and is where it was.
ROOFLAX_INLINE void AddNeighbours(const float* x, float* out) {
  constexpr int64_t kHalf = kRotated / 2;
  for (int64_t i = 0; i < kHalf; ++i) {
    const float even = x[2 * i], odd = x[2 * i + 1];
    out[i] = even + odd;
    out[kHalf + i] = even - odd;
  }
}

void Rotate(const float* x, int64_t count, float* out) {
  alignas(64) float one[kRotated], other[kRotated];
  for (int64_t i = 0; i < count; i += kRotated) {
    AddNeighbours(x + i, one);
    AddNeighbours(one, other);
    AddNeighbours(other, one);
    AddNeighbours(one, other);
    AddNeighbours(other, one);
    AddNeighbours(one, out + i);
  }
}

// ---- The largest ----

int64_t Argmax(const float* x, int64_t count) {
  const int64_t whole = count / kLanes * kLanes;
  F16 best = Broadcast(-INFINITY);
  I16 strange = I16{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F16 values = Load<F16>(x + i);
    strange |= values != values;
    best = Select(values > best, values, best);
  }
  float lane[kLanes];
  Store(lane, best);
  float highest = *std::max_element(lane, lane + kLanes);
  bool has_nan = false;
  int32_t flags[kLanes];
  Store(flags, strange);
  for (int32_t flag : flags) has_nan |= flag != 0;
  for (int64_t i = whole; i < count; ++i) {
    has_nan |= std::isnan(x[i]);
    highest = std::max(highest, x[i]);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (has_nan ? std::isnan(x[i]) : x[i] == highest) return i;
  }
  return 0;
}

int64_t Above(const float* x, int64_t* begin, int64_t end, float least, int32_t* found,
              int64_t room) {
  constexpr int64_t kBlock = 8 * kLanes;
  int64_t count = 0, i = *begin;
  while (i < end && count < room) {
    const int64_t size = std::min(kBlock, end - i);
    if (size == kBlock) {
      F16 highest = Load<F16>(x + i);
      for (int64_t k = kLanes; k < kBlock; k += kLanes) {
        const F16 values = Load<F16>(x + i + k);
        highest = Select(values > highest, values, highest);
      }
      float lane[kLanes];
      Store(lane, highest);
      bool any = false;
      for (float value : lane) any |= !(value <= least);
      if (!any) {
        i += size;
        continue;
      }
    }
    for (const int64_t stop = i + size; i < stop && count < room; ++i) {
      if (x[i] > least) found[count++] = static_cast<int32_t>(i);
    }
  }
  *begin = i;
  return count;
}

// ---- Noise ----

// One block of four rounds and the key that follows it.
template <int kA, int kB, int kC, int kD>
ROOFLAX_INLINE void ThreefryBlock(U16& x0, U16& x1, uint32_t key0, uint32_t key1) {
  const auto round = [&](int by) {
    x0 += x1;
    x1 = ((x1 << by) | (x1 >> (32 - by))) ^ x0;
  };
  round(kA);
  round(kB);
  round(kC);
  round(kD);
  x0 += key0;
  x1 += key1;
}

ROOFLAX_INLINE U16 Threefry(const uint32_t k[3], uint32_t x0_of_all, U16 x1) {
  U16 x0 = U16{} + (x0_of_all + k[0]);
  x1 += k[1];
  ThreefryBlock<13, 15, 26, 6>(x0, x1, k[1], k[2] + 1);
  ThreefryBlock<17, 29, 16, 24>(x0, x1, k[2], k[0] + 2);
  ThreefryBlock<13, 15, 26, 6>(x0, x1, k[0], k[1] + 3);
  ThreefryBlock<17, 29, 16, 24>(x0, x1, k[1], k[2] + 4);
  ThreefryBlock<13, 15, 26, 6>(x0, x1, k[2], k[0] + 5);
  return x0;
}

// Of 23 bits; u lies in the middle of its 2^23rd of (0, 1).
ROOFLAX_INLINE F16 Noise(I16 bits) { return -Log(-Log((ToFloat(bits) + 0.5f) * 0x1p-23f)); }

// The best of a draw so far, and what another has to have to come near it.
struct Drawn {
  int64_t at;
  float best;  // x + noise
  float reach;  // the least x that any noise brings there
  int32_t bits;  // the fewest bits whose noise brings the largest x there

  // With room for what float32 rounds, in the logarithms and in the sum.
  void Take(int64_t i, float value, float largest) {
    constexpr float kMostNoise = 16.64f;  // of u = 1 - 2^-24
    const float room = 1e-3f + 1e-6f * std::fabs(value);
    at = i;
    best = value;
    reach = value - kMostNoise - room;
    const double u = std::exp(-std::exp(static_cast<double>(largest) - value + room));
    bits = std::max(0, static_cast<int32_t>(u * 0x1p23) - 2);
  }
};

// Most tokens are passed over before their noise is known: too unlikely for any noise, or, by far the
// most where no token stands out, by its bits, before the logarithms.
[[gnu::flatten]] int64_t Draw(const DrawArgs& a) {
  constexpr int64_t kTogether = 2;  // vectors, so that their rounds do not wait for each other
  const uint32_t keys[3] = {a.key[0], a.key[1], a.key[0] ^ a.key[1] ^ 0x1BD11BDAu};
  const float largest = a.x[a.first];
  uint32_t number[kLanes];
  for (uint32_t i = 0; i < kLanes; ++i) number[i] = i;
  const U16 lanes = Load<U16>(number);
  const auto bits_of = [&](int64_t i) {
    return As<I16>(Threefry(keys, a.counter, lanes + static_cast<uint32_t>(i)) >> 9);
  };
  float noise[kLanes];
  Drawn drawn;
  Store(noise, Noise(bits_of(a.first)));
  drawn.Take(a.first, largest + noise[0], largest);
  const auto look = [&](int64_t i, int64_t n, I16 bits) {
    const F16 each = Noise(bits);
    if (n == kLanes && !AnyLane(Load<F16>(a.x + i) + each >= Broadcast(drawn.best))) return;
    Store(noise, each);
    for (int64_t k = 0; k < n; ++k) {
      const float x = a.x[i + k], value = x + noise[k];
      if (!(x > a.least) && !(x == a.least && i + k <= a.last)) continue;
      if (value > drawn.best || (value == drawn.best && i + k < drawn.at)) {
        drawn.Take(i + k, value, largest);
      }
    }
  };
  const auto is_alive = [&](F16 x) { return x >= Broadcast(std::max(a.least, drawn.reach)); };
  int64_t i = 0;
  for (; i + kTogether * kLanes <= a.count; i += kTogether * kLanes) {
    I16 alive[kTogether], bits[kTogether];
    ROOFLAX_WHOLE
    for (int64_t j = 0; j < kTogether; ++j) alive[j] = is_alive(Load<F16>(a.x + i + j * kLanes));
    if (!AnyLane(alive[0] | alive[1])) continue;
    ROOFLAX_WHOLE
    for (int64_t j = 0; j < kTogether; ++j) {
      bits[j] = bits_of(i + j * kLanes);
      alive[j] &= bits[j] >= drawn.bits;
    }
    if (!AnyLane(alive[0] | alive[1])) continue;
    for (int64_t j = 0; j < kTogether; ++j) look(i + j * kLanes, kLanes, bits[j]);
  }
  for (; i < a.count; i += kLanes) {
    look(i, std::min(kLanes, a.count - i), bits_of(i));
  }
  return drawn.at;
}

[[gnu::flatten]] float ExpTotal(const float* x, int64_t count, float largest) {
  F16 total = F16{};
  EachVector(count, [&](int64_t i, int64_t n) {
    total += Exp((n == kLanes ? Load<F16>(x + i) : LoadPadded(x + i, n, -INFINITY)) - largest);
  });
  return Sum(total);
}

constexpr int64_t kSummed = 64 * kLanes;  // by float32; what more there is, by float64

[[gnu::flatten]] double ExpEach(const float* x, int64_t count, float largest, float* out) {
  double sum = 0;
  for (int64_t begin = 0; begin < count; begin += kSummed) {
    F16 total = F16{};
    EachVector(std::min(kSummed, count - begin), [&](int64_t i, int64_t n) {
      i += begin;
      const F16 values = Exp((n == kLanes ? Load<F16>(x + i) : LoadPadded(x + i, n, -INFINITY)) - largest);
      total += values;
      StoreSome(out + i, values, n);
    });
    sum += static_cast<double>(Sum(total));
  }
  return sum;
}

[[gnu::flatten]] void SumsAbove(const float* x, const float* weights, int64_t count,
                                const float* levels, double* sums) {
  F16 level[kLevels];
  for (int64_t l = 0; l < kLevels; ++l) {
    level[l] = Broadcast(levels[l]);
    sums[l] = 0;
  }
  for (int64_t begin = 0; begin < count; begin += kSummed) {
    F16 totals[kLevels];
    ROOFLAX_WHOLE
    for (auto& total : totals) total = F16{};
    const auto add = [&](F16 values, F16 weight) {
      ROOFLAX_WHOLE
      for (int64_t l = 0; l < kLevels; ++l) {
        totals[l] += As<F16>(As<I16>(weight) & (values > level[l]));
      }
    };
    EachVector(std::min(kSummed, count - begin), [&](int64_t i, int64_t n) {
      i += begin;
      const F16 values = n == kLanes ? Load<F16>(x + i) : LoadPadded(x + i, n, -INFINITY);
      add(values, weights == nullptr ? Broadcast(1.0f) : LoadSome(weights + i, n));
    });
    for (int64_t l = 0; l < kLevels; ++l) sums[l] += static_cast<double>(Sum(totals[l]));
  }
}
