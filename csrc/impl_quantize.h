// Rows as bytes. Part of kernels_impl.h.

constexpr float kLargestFloat = 3.4028234e38f;

// NaN if any value is NaN or infinite, so that a fault stays visible.
inline float LargestOf(const float* x, int64_t count) {
  F16 largest = F16{};
  I16 strange = I16{};
  EachVector(count, [&](int64_t i, int64_t n) {
    const F16 size = Abs(LoadSome(x + i, n));
    strange |= ~(size <= Broadcast(kLargestFloat));
    largest = Select(size > largest, size, largest);
  });
  return AnyLane(strange) ? NAN : Largest(largest);
}

// Whole numbers near x * inverse, to even where two are as near.
ROOFLAX_INLINE I16 Rounded(F16 x, float inverse) {
  return ToWhole((x * inverse + 12582912.0f) - 12582912.0f);
}

[[gnu::flatten]] void QuantizeRow(const QuantizeRowsArgs& a) {
  const float largest = LargestOf(a.x, a.inner);
  *a.scale = largest / 127.0f;
  constexpr auto kZero = static_cast<uint8_t>(kRowOffset);
  std::fill(a.q + a.inner, a.q + a.stride, kZero);
  if (std::isnan(largest)) return std::fill(a.q, a.q + a.inner, kZero);
  const float inverse = largest > 0.0f ? std::min(127.0f / largest, kLargestFloat) : 0.0f;
  EachVector(a.inner, [&](int64_t i, int64_t n) {
    const B16 bytes = LowBytes(Rounded(LoadSome(a.x + i, n), inverse) + kRowOffset);
    std::memcpy(a.q + i, &bytes, static_cast<size_t>(n));
  });
}

// Half `i` of a group of two planes: the low bytes of its numbers, and 32 further on the high ones. Where they are
// multiplied as words, those in their place, of every four the first and the third before the others.
ROOFLAX_INLINE void StorePlanes(int8_t* q, int64_t i, I16 numbers) {
  if constexpr (kWords) {
    int32_t wide[kLanes];
    Store(wide, numbers);
    int16_t words[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) words[k / 4 * 4 + k % 2 * 2 + k / 2 % 2] = static_cast<int16_t>(wide[k]);
    std::memcpy(q + i * 2 * kLanes, words, sizeof(words));
  } else {
    const I16 high = (numbers + 128) >> 8;
    Store(q + i * kLanes, LowBytes(numbers - (high << 8)));
    Store(q + kGroup + i * kLanes, LowBytes(high));
  }
}

[[gnu::flatten]] void QuantizeGroups(const QuantizeGroupsArgs& a) {
  const float most = a.planes == 1 ? 127.0f : 127.0f * 256.0f;
  for (int64_t g = 0; g < a.inner / kGroup; ++g) {
    const float* x = a.x + g * kGroup;
    const float largest = LargestOf(x, kGroup);
    const bool fault = std::isnan(largest);
    const float inverse = largest > 0.0f ? std::min(most / largest, kLargestFloat) : 0.0f;
    const I16 first = fault ? I16{} : Rounded(Load<F16>(x), inverse);
    const I16 second = fault ? I16{} : Rounded(Load<F16>(x + kLanes), inverse);
    int8_t* q = a.q + g * a.rows * kGroup * a.planes;
    if (a.planes == 1) {
      Store(q, LowBytes(first));
      Store(q + kLanes, LowBytes(second));
    } else {
      StorePlanes(q, 0, first);
      StorePlanes(q, 1, second);
    }
    a.scale[g * a.rows] = largest / most;
    const I16 parts[] = {a.parts == 1 ? first + second : first, second};
    for (int64_t part = 0; part < a.parts; ++part) {
      const int32_t sum = SumWhole(parts[part]), start = sum * a.times;
      const float scaled = a.scale[g * a.rows] * static_cast<float>(sum);
      std::memcpy(a.start + (g * a.parts + part) * a.rows, a.times == 0 ? static_cast<const void*>(&scaled) : &start, 4);
    }
  }
}
