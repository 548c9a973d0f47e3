// Matmuls with a matrix of float32 or bfloat16 as it is, [inner, outer]. Part of kernels_impl.h.

// What fits into registers.
//   kDepth                 rows of w that few rows of x meet at a time
//   kFewTile, kFewVectors  rows of x and vectors of columns that meet them together
//   kAhead                 columns ahead that few rows fetch, at most to the next rows of w
//   kOneFetches            whether one row of x does so too
//   kWideStripe            pairs of vectors of one row's sums, where a stripe of them streams
#if defined(__AVX512F__)
constexpr int64_t kDepth = 8, kFewTile = 1, kFewVectors = 2;
constexpr int64_t kAhead = kFarApart ? 128 : 4096, kWideStripe = kFarApart ? 0 : 12;
constexpr bool kOneFetches = kFarApart;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int64_t kDepth = 8, kFewTile = 4, kFewVectors = 1, kAhead = 128, kWideStripe = 0;
constexpr bool kOneFetches = true;
#else
constexpr int64_t kDepth = 1, kFewTile = 1, kFewVectors = 2, kAhead = 4096, kWideStripe = 0;
constexpr bool kOneFetches = false;
#endif

constexpr int64_t kPair = 2 * kLanes;

// ---- In which order w is read ----

// kDepth rows of a part are read together. They are neighbours, unless rows are short and memory is read
// from several places: then the part has kDepth stretches, and they are a row of each. Inputs are put
// into that order beforehand.
constexpr int64_t kShortRow = kFarApart ? 8192 : 0;  // bytes

template <typename W>
inline bool IsStretched(const MatmulArgs& a) {
  return a.out.outer * static_cast<int64_t>(sizeof(W)) < kShortRow;
}

// Rows in a stretch of a part, an odd number: rows are often a multiple of 512 bytes, and stretches that
// begin a multiple of 4096 bytes apart share a cache's sets. What is left of the part comes after them.
constexpr int64_t StretchLength(int64_t part_length) {
  return part_length < kDepth ? 0 : (part_length / kDepth - 1) | 1;
}

// The row of w that comes at `position`, in the part [begin, end).
inline int64_t StretchedRow(int64_t position, int64_t begin, int64_t end) {
  const int64_t length = StretchLength(end - begin), at = position - begin;
  return at < length * kDepth ? begin + at % kDepth * length + at / kDepth : position;
}

void OrderInputs(const float* x, int64_t inner, float* out) {
  for (int64_t begin = 0, end; begin < inner; begin = end) {
    end = std::min(inner, begin + PartLength(inner));
    const int64_t length = StretchLength(end - begin), rest = begin + length * kDepth;
    for (int64_t i = 0; i < length; ++i) {
      for (int64_t d = 0; d < kDepth; ++d) out[begin + i * kDepth + d] = x[begin + d * length + i];
    }
    std::copy(x + rest, x + end, out + rest);
  }
}

// ---- Few rows of x ----

// Columns n to n + 31 of a row of w; of bfloat16 the even ones, then the odd ones.
ROOFLAX_INLINE void LoadPair(const float* from, F16 (&pair)[2]) {
  pair[0] = Load<F16>(from);
  pair[1] = Load<F16>(from + kLanes);
}
ROOFLAX_INLINE void LoadPair(const uint16_t* from, F16 (&pair)[2]) {
  const U16 both = Load<U16>(from);
  pair[0] = As<F16>(both << 16);
  pair[1] = As<F16>(both & 0xffff0000u);
}

// Sums of pairs, in the order of their columns again.
inline void Unpair(const float*, float*, int64_t) {}
inline void Unpair(const uint16_t*, float* sums, int64_t count) {
  for (int64_t n = 0; n < count; n += kPair) {
    float even[kLanes], odd[kLanes];
    std::copy(sums + n, sums + n + kLanes, even);
    std::copy(sums + n + kLanes, sums + n + kPair, odd);
    for (int64_t i = 0; i < kLanes; ++i) {
      sums[n + 2 * i] = even[i];
      sums[n + 2 * i + 1] = odd[i];
    }
  }
}

// sums[r, n] += x[r, d] * w[d, n] for R rows of x, D of w and V vectors; load(d, vectors) gives those of w.
template <int64_t R, int64_t V, int64_t D, typename LoadRow>
ROOFLAX_INLINE void AddTile(const float* x, int64_t inner, const LoadRow& load, float* sums,
                            int64_t stride) {
  F16 own[R][V];
  ROOFLAX_WHOLE
  for (int64_t r = 0; r < R; ++r) {
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < V; ++i) own[r][i] = Load<F16>(sums + r * stride + i * kLanes);
  }
  ROOFLAX_WHOLE
  for (int64_t d = 0; d < D; ++d) {
    F16 wide[V];
    load(d, wide);
    ROOFLAX_WHOLE
    for (int64_t r = 0; r < R; ++r) {
      ROOFLAX_WHOLE
      for (int64_t i = 0; i < V; ++i) own[r][i] += x[r * inner + d] * wide[i];
    }
  }
  ROOFLAX_WHOLE
  for (int64_t r = 0; r < R; ++r) {
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < V; ++i) Store(sums + r * stride + i * kLanes, own[r][i]);
  }
}

// How many tiles of each number of rows; all are about as tall.
struct RowTiles {
  int64_t of[kFewTile + 1] = {};

  explicit RowTiles(int64_t rows) {
    for (int64_t tall; rows > 0; rows -= tall) ++of[tall = Evenly(rows, kFewTile)];
  }
};

// The same of a pair of vectors and all rows, the tallest tiles first; vector_of(d, i) is vector i of row d.
template <int64_t R, int64_t D, typename VectorOf>
ROOFLAX_INLINE void AddTiles(const RowTiles& tiles, const float* x, int64_t inner, const VectorOf& vector_of,
                             float* sums, int64_t stride) {
  static_assert(2 % kFewVectors == 0);
  for (int64_t i = 0; i < tiles.of[R]; ++i, x += R * inner, sums += R * stride) {
    ROOFLAX_WHOLE
    for (int64_t first = 0; first < 2; first += kFewVectors) {
      const auto load = [&](int64_t d, F16 (&vectors)[kFewVectors]) {
        ROOFLAX_WHOLE
        for (int64_t i = 0; i < kFewVectors; ++i) vectors[i] = vector_of(d, first + i);
      };
      const float* from = x;
      if constexpr (kFewTile > 1) Hide(from);  // else x is kept on the stack, each number as a whole vector
      AddTile<R, kFewVectors, D>(from, inner, load, sums + first * kLanes, stride);
    }
  }
  if constexpr (R > 1) AddTiles<R - 1, D>(tiles, x, inner, vector_of, sums, stride);
}

// The same with rows of w that begin `step` numbers from each other.
template <int64_t D, typename W>
ROOFLAX_INLINE void AddPair(const RowTiles& tiles, const float* x, int64_t inner, const W* w, int64_t step,
                            float* sums, int64_t stride) {
  if constexpr (kFewTile > 1 && sizeof(W) == sizeof(float)) {
    const auto vector_of = [&](int64_t d, int64_t i) {
      return Load<F16>(w + d * step + i * kLanes);
    };
    AddTiles<kFewTile, D>(tiles, x, inner, vector_of, sums, stride);
  } else {
    F16 wide[D][2];
    ROOFLAX_WHOLE
    for (int64_t d = 0; d < D; ++d) LoadPair(w + d * step, wide[d]);
    const F16(*from)[2] = wide;
    if constexpr (kFewTile > 1) Hide(from);  // else each row of a tile reads it from the stack
    const auto vector_of = [&](int64_t d, int64_t i) { return from[d][i]; };
    AddTiles<kFewTile, D>(tiles, x, inner, vector_of, sums, stride);
  }
}

// sums[m, n] += x[m, d] * w[d * apart, n] for D rows of w, one after the other, and `width` columns; of one row
// of x or of as many as there are. What is fetched last is the next rows': D further on, or of stretches the next
// of each.
template <bool kOne, int64_t D, typename W>
void AddRows(const MatmulArgs& a, const RowTiles& tiles, const float* x, const W* w, int64_t apart, int64_t width,
             float* sums) {
  const int64_t step = apart * a.out.outer, next = (apart > 1 ? 1 : D) * a.out.outer;
  const int64_t whole = width / kPair * kPair, far = std::min(kAhead, whole);
  const int64_t rows = kOne ? 1 : a.rows;
  constexpr bool kCopies = !kOne && kFewTile > 1;  // so that no address of x needs a register of its own
  float copies[kCopies ? kFewRows * D : 1];
  for (int64_t m = 0; kCopies && m < rows; ++m) {
    std::copy(x + m * a.inner, x + m * a.inner + D, copies + m * D);
  }
  for (int64_t n = 0; n < whole; n += kPair) {
    const W* line = w + n;
    const W* ahead = n + far < whole ? line + far : line + far - whole + next;
    const auto fetch = [&](int64_t d) {
      if constexpr (!kOne || kOneFetches) {
        __builtin_prefetch(ahead + d * step);
        if constexpr (sizeof(W) == 4) __builtin_prefetch(ahead + d * step + kLanes);
      }
    };
    if constexpr (kOne) {
      const auto load = [&](int64_t d, F16 (&pair)[2]) {
        fetch(d);
        LoadPair(line + d * step, pair);
      };
      AddTile<1, 2, D>(x, a.inner, load, sums + n, 0);
    } else {
      ROOFLAX_WHOLE
      for (int64_t d = 0; d < D; ++d) fetch(d);
      AddPair<D>(tiles, kCopies ? copies : x, kCopies ? D : a.inner, line, step, sums + n, a.parts_stride);
    }
  }
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = whole; n < width; ++n) {
      float sum = sums[m * a.parts_stride + n];
#if defined(__aarch64__)  // else GCC multiplies in vectors and rounds before it adds
      for (int64_t d = 0; d < D; ++d) sum = __builtin_fmaf(x[m * a.inner + d], Widen(w[d * step + n]), sum);
#else
      for (int64_t d = 0; d < D; ++d) sum += x[m * a.inner + d] * Widen(w[d * step + n]);
#endif
      sums[m * a.parts_stride + n] = sum;
    }
  }
}

constexpr int64_t kStripeAhead = 8;  // rows of w that are fetched before they are needed

// sums[n] = sum of x[k] * w[k, n] for kPairs pairs of columns, whose sums stay in registers; `next`
// is the stripe that follows. Their loads keep more of memory busy than those of `AddRows`, which
// wait for sums to be stored.
template <int64_t kPairs>
void OneRowStripe(const float* x, int64_t inner, const uint16_t* w, int64_t outer,
                  const uint16_t* next, float* to) {
  F16 sums[kPairs][2];
  for (auto& pair : sums) pair[0] = pair[1] = F16{};
  for (int64_t k = 0; k < inner; ++k) {
    const uint16_t* line = w + k * outer;
    const int64_t left = inner - k - kStripeAhead;
    const uint16_t* ahead = left > 0 ? line + kStripeAhead * outer : next - left * outer;
    for (int64_t i = 0; i < kPairs; ++i) {
      __builtin_prefetch(ahead + i * kPair);
      F16 wide[2];
      LoadPair(line + i * kPair, wide);
      sums[i][0] += x[k] * wide[0];
      sums[i][1] += x[k] * wide[1];
    }
  }
  for (int64_t i = 0; i < kPairs; ++i) {
    Store(to + i * kPair, sums[i][0]);
    Store(to + i * kPair + kLanes, sums[i][1]);
  }
  Unpair(w, to, kPairs * kPair);
}

// One row times bfloat16: one part's sums from column n on, by whole stripes; where those end.
template <int64_t kPairs>
int64_t OneRowStripes(const MatmulArgs& a, int64_t k_begin, int64_t k_end, int64_t n) {
  constexpr int64_t kStripe = kPairs * kPair;
  for (; n + kStripe <= a.end; n += kStripe) {
    const auto* w = static_cast<const uint16_t*>(a.w) + k_begin * a.out.outer + n;
    const uint16_t* next = n + 2 * kStripe <= a.end ? w + kStripe : w;
    OneRowStripe<kPairs>(a.x + k_begin, k_end - k_begin, w, a.out.outer, next,
                         a.parts + n - a.parts_begin);
  }
  return n;
}

// Sums of few rows, which stay in the first cache while w streams past them.
constexpr int64_t kFewSums = 4096;

// One row or few: one part's sums of columns [begin, end).
template <bool kOne, typename W>
void MatmulFew(const MatmulArgs& a) {
  const auto* w = static_cast<const W*>(a.w);
  const int64_t k_begin = a.part * PartLength(a.inner);
  const int64_t k_end = std::min(a.inner, k_begin + PartLength(a.inner));
  const int64_t apart = IsStretched<W>(a) ? StretchLength(k_end - k_begin) : 0;
  const int64_t stretched = k_begin + apart * kDepth;  // where stretches end
  const int64_t rows = kOne ? 1 : a.rows, most = kFewSums / rows / kPair * kPair;
  const RowTiles tiles(rows);
  int64_t begin = a.begin;
  if constexpr (kOne && sizeof(W) == 2 && kWideStripe > 0) {
    begin = OneRowStripes<kWideStripe>(a, k_begin, k_end, begin);
    begin = OneRowStripes<kWideStripe / 3>(a, k_begin, k_end, begin);
  }
  for (; begin < a.end; begin += most) {
    const int64_t width = std::min(most, a.end - begin);
    float* sums = a.parts + begin - a.parts_begin;
    for (int64_t m = 0; m < rows; ++m) {
      std::fill(sums + m * a.parts_stride, sums + m * a.parts_stride + width, 0.0f);
    }
    int64_t k = k_begin;
    for (; k < stretched; k += kDepth) {
      const int64_t row = k_begin + (k - k_begin) / kDepth;
      AddRows<kOne, kDepth>(a, tiles, a.x + k, w + row * a.out.outer + begin, apart, width, sums);
    }
    for (; k + kDepth <= k_end; k += kDepth) {
      AddRows<kOne, kDepth>(a, tiles, a.x + k, w + k * a.out.outer + begin, 1, width, sums);
    }
    for (; k < k_end; ++k) AddRows<kOne, 1>(a, tiles, a.x + k, w + k * a.out.outer + begin, 1, width, sums);
    for (int64_t m = 0; m < rows; ++m) Unpair(w, sums + m * a.parts_stride, width / kPair * kPair);
  }
}

template <typename W>
void MatmulPartOf(const MatmulArgs& a) {
  a.rows == 1 ? MatmulFew<true, W>(a) : MatmulFew<false, W>(a);
}

void MatmulPart(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? MatmulPartOf<float>(a) : MatmulPartOf<uint16_t>(a);
}

// The parts' sums added up in their order, into the output.
void AddParts(const MatmulArgs& a) {
  const int64_t width = a.end - a.begin;
  for (int64_t m = 0; m < a.rows; ++m) {
    float* total = a.parts + m * a.parts_stride + a.begin - a.parts_begin;
    for (int64_t part = 1; part < NumParts(a.inner); ++part) {
      const float* more = total + part * a.parts_size;
      for (int64_t n = 0; n < width; ++n) total[n] += more[n];
    }
    Finish(a.out, m, a.begin, width, total);
  }
}

// ---- Many rows of x ----

constexpr int64_t kPackAhead = 4;  // rows

// Panels of columns of the rows at positions [k, k_end), the last panel filled up with zeros.
template <typename W>
void PackColumns(const MatmulArgs& a, int64_t first_panel, int64_t panels, int64_t k, int64_t k_end,
                 float* to) {
  const int64_t outer = a.out.outer, begin = a.begin + first_panel * kColumns;
  const int64_t whole = std::min(panels, (a.end - begin) / kColumns);
  const W* w = static_cast<const W*>(a.w) + begin;
  const int64_t part_begin = k / PartLength(a.inner) * PartLength(a.inner);
  const int64_t part_end = std::min(a.inner, part_begin + PartLength(a.inner));
  const bool stretched = IsStretched<W>(a);
  const int64_t ahead = (stretched ? 1 : kPackAhead) * outer;
  for (int64_t at = k; at < k_end; ++at) {
    const W* from = w + (stretched ? StretchedRow(at, part_begin, part_end) : at) * outer;
    float* line = to + (at - k) * kColumns;
    for (int64_t p = 0; p < whole; ++p, line += kBlockInner * kColumns) {
      for (int64_t i = 0; i < kColumns; i += kLanes) {
        const W* some = from + p * kColumns + i;
        if (i * sizeof(W) % 64 == 0) __builtin_prefetch(some + ahead);
        Store(line + i, LoadWide(some));
      }
    }
    for (int64_t i = 0; whole < panels && i < kColumns; ++i) {
      const int64_t n = whole * kColumns + i;
      line[i] = n < a.end - begin ? Widen(from[n]) : 0.0f;
    }
  }
}

// Columns [begin, end) of any number of rows, summed in parts; pack as `MultiplyMany` has it.
template <typename Pack>
void MultiplyColumns(const MatmulArgs& a, int64_t part_length, const Pack& pack) {
  const int64_t panels = (a.end - a.begin + kColumns - 1) / kColumns;
  MultiplyMany(a.x, a.rows, a.inner, part_length, 0, panels, pack,
               [&](int64_t row, int64_t panel, const float* sums) {
                 const int64_t n = a.begin + panel * kColumns;
                 Finish(a.out, row, n, std::min(kColumns, a.end - n), sums);
               });
}

template <typename W>
void MatmulMany(const MatmulArgs& a) {
  MultiplyColumns(a, PartLength(a.inner), [&](int64_t first, int64_t panels, int64_t k, int64_t k_end, float* to) {
    PackColumns<W>(a, first, panels, k, k_end, to);
  });
}

void Matmul(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? MatmulMany<float>(a) : MatmulMany<uint16_t>(a);
}

// ---- Many rows of x times the transpose of a matrix ----

constexpr int64_t kTransposeAhead = 256;  // bytes of a row

// Panels of inputs [k, k_end) of w, [outer, inner], the last panel filled up with zeros.
template <typename W>
void PackTransposed(const MatmulArgs& a, int64_t first_panel, int64_t panels, int64_t k, int64_t k_end, float* to) {
  const int64_t begin = a.begin + first_panel * kColumns, count = std::min(panels * kColumns, a.end - begin);
  const W* w = static_cast<const W*>(a.w) + begin * a.inner;
  for (int64_t n = 0; n < panels * kColumns; n += kLanes) {
    float* panel = to + n / kColumns * kBlockInner * kColumns + n % kColumns;
    for (int64_t at = k; at < k_end; at += kLanes) {
      const int64_t width = std::min(kLanes, k_end - at);
      const auto row = [&](int64_t r) {
        if (n + r >= count) return F16{};
        const W* from = w + (n + r) * a.inner + at;  // a whole line of float32: rows may share a cache's sets
        __builtin_prefetch(reinterpret_cast<const char*>(from) + kTransposeAhead, 0, 2);
        return LoadSome(from, width);
      };
      Transpose(row, [&](int64_t i, F16 line) {
        if (i < width) Store(panel + (at - k + i) * kColumns, line);
      });
    }
  }
}

template <typename W>
void TransposedMany(const MatmulArgs& a) {
  MultiplyColumns(a, std::max<int64_t>(1, a.inner),
                  [&](int64_t first, int64_t panels, int64_t k, int64_t k_end, float* to) {
                    PackTransposed<W>(a, first, panels, k, k_end, to);
                  });
}

void MatmulTransposed(const MatmulArgs& a) {
  a.width == Width::kFloat32 ? TransposedMany<float>(a) : TransposedMany<uint16_t>(a);
}
