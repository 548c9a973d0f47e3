// Attention of whole sequences and its gradients, for training, as XLA custom calls.

#include <algorithm>
#include <climits>
#include <memory>
#include <vector>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

using S32 = ffi::Buffer<ffi::S32>;

// Items of work that the backward pass has at least, if there are so many tiles: as many threads share it,
// and none of its sums depends on how many they are.
constexpr int64_t kFewestItems = 16;

int64_t Tiles(int64_t count) { return (count + kWholeBlock - 1) / kWholeBlock; }

struct Inputs {
  F32 q, k, v;  // [rows, queries, heads, head_dim]; keys and values [rows, kv_heads, keys, head_dim]
  S32 positions, key_positions, context_lens;  // [rows, queries], [rows, keys], [rows]
  S32 segments;  // [rows, keys] where there are as many queries, or none
  F32 sinks;  // [heads] or none
};

// The sequences of a call: sizes, which queries see which keys, and keys and values transposed.
struct Sequences {
  int64_t rows, queries, heads, head_dim, kv_heads, keys, group, tiles, key_tiles, key_step;
  std::vector<int32_t> low, high, segments, key_positions, key_segments;
  std::vector<Sight> sight;  // [rows, tiles, key_tiles]
  std::unique_ptr<float[]> k_transposed, v_transposed;  // [rows, kv_heads, head_dim, key_step]

  bool Fits(const Inputs& in) {
    if (Rank(in.q) != 4 || Rank(in.k) != 4 || !SameShape(in.k, in.v) || Rank(in.positions) != 2 ||
        Rank(in.key_positions) != 2 || Rank(in.context_lens) != 1) {
      return false;
    }
    rows = Dim(in.q, 0), queries = Dim(in.q, 1), heads = Dim(in.q, 2), head_dim = Dim(in.q, 3);
    kv_heads = Dim(in.k, 1), keys = Dim(in.k, 2);
    if (Dim(in.k, 0) != rows || Dim(in.k, 3) != head_dim || head_dim % kPanel != 0 || kv_heads < 1 ||
        heads % kv_heads != 0 || Dim(in.positions, 0) != rows || Dim(in.positions, 1) != queries ||
        Dim(in.key_positions, 0) != rows || Dim(in.key_positions, 1) != keys ||
        Dim(in.context_lens, 0) != rows) {
      return false;
    }
    const auto some = static_cast<int64_t>(in.segments.element_count());
    if (some != 0 && (!SameShape(in.segments, in.key_positions) || keys != queries)) return false;
    const auto sinks = static_cast<int64_t>(in.sinks.element_count());
    if (sinks != 0 && (Rank(in.sinks) != 1 || sinks != heads)) return false;
    group = heads / kv_heads, tiles = Tiles(queries), key_tiles = Tiles(keys);
    key_step = (keys + kPanel - 1) / kPanel * kPanel;
    return true;
  }

  // A key behind the last is of the highest position, which no query sees.
  void See(const Inputs& in, int64_t window, int64_t ahead) {
    const bool apart = in.segments.element_count() > 0;
    const auto among = [](int64_t x) {
      return static_cast<int32_t>(std::clamp<int64_t>(x, INT_MIN, INT_MAX - 1));
    };
    for (int64_t b = 0; b < rows; ++b) {
      const int64_t context = in.context_lens.typed_data()[b];
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t at = b * queries + i, position = in.positions.typed_data()[at];
        low.push_back(window > 0 ? among(position - window) : INT_MIN);
        high.push_back(among(std::min(position + ahead, context - 1)));
        segments.push_back(apart ? in.segments.typed_data()[at] : 0);
      }
      for (int64_t j = 0; j < key_step; ++j) {
        const int64_t at = b * keys + j;
        key_positions.push_back(j < keys ? in.key_positions.typed_data()[at] : INT_MAX);
        key_segments.push_back(j < keys && apart ? in.segments.typed_data()[at] : 0);
      }
      for (int64_t tile = 0; tile < tiles; ++tile) {
        for (int64_t key_tile = 0; key_tile < key_tiles; ++key_tile) {
          sight.push_back(Of(b, tile * kWholeBlock, key_tile * kWholeBlock));
        }
      }
    }
  }

  struct Range {
    int32_t least = INT_MAX, most = INT_MIN;
    Range(const int32_t* from, int64_t count) {
      for (int64_t i = 0; i < count; ++i) least = std::min(least, from[i]), most = std::max(most, from[i]);
    }
  };

  Sight Of(int64_t b, int64_t first, int64_t first_key) const {
    const int64_t count = std::min(kWholeBlock, queries - first), at = b * queries + first;
    const int64_t key_count = std::min(kWholeBlock, key_step - first_key), key = b * key_step + first_key;
    const Range lows(&low[at], count), highs(&high[at], count), own(&segments[at], count);
    const Range places(&key_positions[key], key_count), others(&key_segments[key], key_count);
    if (places.least > highs.most || places.most <= lows.least || others.least > own.most ||
        others.most < own.least) {
      return Sight::kNothing;
    }
    const bool all = places.most <= highs.least && places.least > lows.most && own.least == own.most &&
                     others.least == own.least && others.most == own.least;
    return all ? Sight::kAll : Sight::kSome;
  }

  // Of every K/V head; `schedule` as ParallelFor has it.
  template <typename Schedule>
  void Transpose(const Inputs& in, bool values, int64_t threads, const Schedule& schedule) {
    const auto size = static_cast<size_t>(rows * kv_heads * head_dim * key_step);
    k_transposed.reset(new float[size]);
    if (values) v_transposed.reset(new float[size]);
    const auto transpose = [&](const float* from, float* to, int64_t i) {
      from += i * keys * head_dim;
      to += i * key_step * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) {
        for (int64_t j = 0; j < keys; ++j) to[d * key_step + j] = from[j * head_dim + d];
        std::fill(to + d * key_step + keys, to + (d + 1) * key_step, 0.0f);
      }
    };
    ParallelFor(rows * kv_heads, threads, schedule, [&](int64_t i) {
      transpose(in.k.typed_data(), k_transposed.get(), i);
      if (values) transpose(in.v.typed_data(), v_transposed.get(), i);
    });
  }

  int64_t Operations() const { return rows * heads * queries * keys * head_dim; }

  // Of a tile of a head's queries. `out` and `log_sums` are the whole arrays.
  WholeArgs Args(const Inputs& in, float scale, int64_t b, int64_t head, int64_t tile, float* out,
                 float* log_sums) const {
    const int64_t first = tile * kWholeBlock, at = ((b * queries + first) * heads + head) * head_dim;
    const int64_t kv = b * kv_heads + head / group;
    WholeArgs a{};
    a.head_dim = head_dim;
    a.queries = std::min(kWholeBlock, queries - first);
    a.query_step = heads * head_dim;
    a.q = in.q.typed_data() + at;
    a.low = &low[b * queries + first];
    a.high = &high[b * queries + first];
    a.segments = &segments[b * queries + first];
    a.keys = keys;
    a.key_step = key_step;
    a.k = in.k.typed_data() + kv * keys * head_dim;
    a.v = in.v.typed_data() + kv * keys * head_dim;
    a.k_transposed = k_transposed.get() + kv * key_step * head_dim;
    a.v_transposed = v_transposed == nullptr ? nullptr : v_transposed.get() + kv * key_step * head_dim;
    a.positions = key_positions.data() + b * key_step;
    a.key_segments = key_segments.data() + b * key_step;
    a.sight = sight.data() + (b * tiles + tile) * key_tiles;
    a.sink = in.sinks.element_count() > 0 ? in.sinks.typed_data() + head : nullptr;
    a.scale = scale;
    a.out = out + at;
    a.log_sums = log_sums + (b * heads + head) * queries + first;
    return a;
  }
};

bool AreLogSums(const F32& log_sums, const Sequences& s) {
  return Rank(log_sums) == 3 && Dim(log_sums, 0) == s.rows && Dim(log_sums, 1) == s.heads &&
         Dim(log_sums, 2) == s.queries;
}

ffi::Error Whole(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 positions, S32 key_positions, S32 context_lens,
                 S32 segments, F32 sinks, ffi::Result<F32> out, ffi::Result<F32> log_sums, float scale,
                 int64_t window, int64_t ahead) {
  const Inputs in{q, k, v, positions, key_positions, context_lens, segments, sinks};
  Sequences s;
  if (!s.Fits(in) || !SameShape(q, *out) || !AreLogSums(*log_sums, s) || window < 0 || ahead < 0 ||
      window > INT_MAX || ahead > INT_MAX) {
    return Reject("whole attention: shapes");
  }
  const auto schedule = [&](auto task) { pool.Schedule(std::move(task)); };
  const int64_t threads = ThreadsFor(pool, s.Operations());
  s.See(in, window, ahead);
  s.Transpose(in, false, threads, schedule);
  ParallelFor(s.rows * s.heads * s.tiles, threads, schedule, [&](int64_t i) {
    const int64_t tile = s.tiles - 1 - i % s.tiles;  // the longest first
    const int64_t b = i / s.tiles / s.heads, head = i / s.tiles % s.heads;
    ChosenKernels().whole(s.Args(in, scale, b, head, tile, out->typed_data(), log_sums->typed_data()));
  });
  return ffi::Error::Success();
}

ffi::Error WholeBackward(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 positions, S32 key_positions,
                         S32 context_lens, S32 segments, F32 sinks, F32 out, F32 log_sums, F32 d_out,
                         ffi::Result<F32> dq, ffi::Result<F32> dk, ffi::Result<F32> dv, float scale,
                         int64_t window, int64_t ahead) {
  const Inputs in{q, k, v, positions, key_positions, context_lens, segments, sinks};
  Sequences s;
  if (!s.Fits(in) || !SameShape(q, out) || !SameShape(q, d_out) || !SameShape(q, *dq) || !SameShape(k, *dk) ||
      !SameShape(v, *dv) || !AreLogSums(log_sums, s) || window < 0 || ahead < 0 || window > INT_MAX ||
      ahead > INT_MAX) {
    return Reject("gradients of whole attention: shapes");
  }
  const auto schedule = [&](auto task) { pool.Schedule(std::move(task)); };
  const int64_t threads = ThreadsFor(pool, s.Operations());
  s.See(in, window, ahead);
  s.Transpose(in, true, threads, schedule);
  std::fill_n(dk->typed_data(), k.element_count(), 0.0f);
  std::fill_n(dv->typed_data(), v.element_count(), 0.0f);
  // An item has a K/V head's keys, or a share of them; then each share has queries' gradients of its own.
  const int64_t items = std::max<int64_t>(1, s.rows * s.kv_heads);
  const int64_t wanted = std::clamp<int64_t>((kFewestItems + items - 1) / items, 1, std::max<int64_t>(1, s.key_tiles));
  const int64_t share = std::max<int64_t>(1, (s.key_tiles + wanted - 1) / wanted);
  const int64_t shares = std::max<int64_t>(1, (s.key_tiles + share - 1) / share);
  const auto size = static_cast<int64_t>(q.element_count());
  std::unique_ptr<float[]> others(new float[static_cast<size_t>((shares - 1) * size)]);
  ParallelFor(items * shares, threads, schedule, [&](int64_t i) {
    if (s.rows == 0) return;
    const int64_t number = i % shares, kv = i / shares % s.kv_heads, b = i / shares / s.kv_heads;
    const int64_t keys_at = (b * s.kv_heads + kv) * s.keys * s.head_dim;
    float* own = number == 0 ? dq->typed_data() : others.get() + (number - 1) * size;
    for (int64_t head = kv * s.group; head < (kv + 1) * s.group; ++head) {
      for (int64_t tile = 0; tile < s.tiles; ++tile) {
        WholeArgs a = s.Args(in, scale, b, head, tile, out.typed_data(), log_sums.typed_data());
        const int64_t at = a.q - q.typed_data();
        a.begin = number * share * kWholeBlock;
        a.end = std::min(s.keys, a.begin + share * kWholeBlock);
        a.d_out = d_out.typed_data() + at;
        a.dq = own + at;
        a.dk = dk->typed_data() + keys_at;
        a.dv = dv->typed_data() + keys_at;
        ChosenKernels().whole_backward(a);
      }
    }
  });
  if (shares > 1) {
    constexpr int64_t kPiece = 1 << 14;
    ParallelFor((size + kPiece - 1) / kPiece, threads, schedule, [&](int64_t i) {
      float* to = dq->typed_data();
      for (int64_t n = 0; n < shares - 1; ++n) {
        const float* from = others.get() + n * size;
        for (int64_t j = i * kPiece; j < std::min(size, (i + 1) * kPiece); ++j) to[j] += from[j];
      }
    });
  }
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_whole_attention, Whole,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>()
                    .Arg<S32>().Arg<S32>().Arg<F32>().Ret<F32>().Ret<F32>().Attr<float>("scale")
                    .Attr<int64_t>("window").Attr<int64_t>("ahead"));
ROOFLAX_HANDLER(rooflax_whole_attention_gradients, WholeBackward,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>()
                    .Arg<S32>().Arg<S32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Ret<F32>().Ret<F32>()
                    .Ret<F32>().Attr<float>("scale").Attr<int64_t>("window").Attr<int64_t>("ahead"));

}  // namespace rooflax
