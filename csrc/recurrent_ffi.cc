// What goes on from rows of a pool of states, in place: the gated delta rule and the causal convolution, as
// XLA custom calls.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

using S32 = ffi::Buffer<ffi::S32>;

constexpr int64_t kConvChannels = 1024;  // of one token, that a thread takes at once

// x / sqrt(|x|^2 + eps) * scale: one function, so that every row is computed alike.
__attribute__((noinline)) void Normalise(const float* x, int64_t count, float eps, float scale, float* out) {
  float squares = 0;
  for (int64_t i = 0; i < count; ++i) squares += x[i] * x[i];
  const float factor = scale / std::sqrt(squares + eps);
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] * factor;
}

// Of each sequence its tokens one after the other: those of number [starts, starts + lens) go on from the
// pool's row `rows`, or from zeros where `is_new`. States go to `targets`, each after `reached` of the
// tokens; a target of kNoSlot or more is nowhere.
struct Runs {
  S32 starts, lens, rows, is_new, targets, reached;

  int64_t Count() const { return Dim(starts, 0); }
  int64_t NumTargets() const { return Dim(targets, 1); }
  int64_t Target(int64_t i, int64_t j) const { return targets.typed_data()[i * NumTargets() + j]; }
  int64_t Reached(int64_t i, int64_t j) const { return reached.typed_data()[i * NumTargets() + j]; }

  bool Fit() const {
    return Rank(starts) == 1 && SameShape(starts, lens) && SameShape(starts, rows) &&
           SameShape(starts, is_new) && Rank(targets) == 2 && SameShape(targets, reached) &&
           Dim(targets, 0) == Dim(starts, 0);
  }

  // What leaves the list or the pool, or null; how many tokens are computed.
  const char* Outside(int64_t tokens, int64_t num_rows, int64_t& computed) const {
    computed = 0;
    for (int64_t i = 0; i < Count(); ++i) {
      const int64_t start = starts.typed_data()[i], len = lens.typed_data()[i];
      if (len == 0) continue;
      if (len < 0 || start < 0 || start > tokens - len) return "tokens of a sequence";
      const int64_t row = rows.typed_data()[i];
      if (row < 0 || row >= num_rows) return "a row outside the pool";
      for (int64_t j = 0; j < NumTargets(); ++j) {
        const int64_t target = Target(i, j);
        if (target < 0 || (target >= num_rows && target < kNoSlot)) return "a target outside the pool";
      }
      computed += len;
    }
    return nullptr;
  }
};

// The result is the pool itself. Outputs of tokens that are no sequence's are zero.
ffi::Error DeltaRule(ffi::ThreadPool threads, F32 q, F32 k, F32 v, F32 g, F32 beta, F32 pool,
                     S32 starts, S32 lens, S32 rows, S32 is_new, S32 targets, S32 reached,
                     ffi::Result<F32> out, ffi::Result<F32> states, float eps) {
  const Runs runs{starts, lens, rows, is_new, targets, reached};
  if (Rank(q) != 3 || !SameShape(q, k) || Rank(v) != 4 || Rank(g) != 3 || !SameShape(g, beta) ||
      Rank(pool) != 5 || !SameShape(pool, *states) || !SameShape(v, *out) || !runs.Fit()) {
    return Reject("delta rule: shapes");
  }
  const int64_t tokens = Dim(q, 0), heads = Dim(q, 1), key_dim = Dim(q, 2);
  const int64_t group = Dim(v, 2), value_dim = Dim(v, 3), num_rows = Dim(pool, 0);
  if (Dim(v, 0) != tokens || Dim(v, 1) != heads || Dim(g, 0) != tokens || Dim(g, 1) != heads ||
      Dim(g, 2) != group || Dim(pool, 1) != heads || Dim(pool, 2) != group ||
      Dim(pool, 3) != key_dim || Dim(pool, 4) != value_dim) {
    return Reject("delta rule: sizes");
  }
  const int64_t sequences = runs.Count(), num_targets = runs.NumTargets();
  int64_t computed = 0;
  if (const char* why = runs.Outside(tokens, num_rows, computed)) {
    return Reject((std::string("delta rule: ") + why).c_str());
  }
  const int64_t matrix = key_dim * value_dim;
  float* to = states->typed_data();
  if (to != pool.typed_data()) std::memcpy(to, pool.typed_data(), pool.size_bytes());
  if (computed < tokens) std::fill_n(out->typed_data(), v.element_count(), 0.0f);
  std::vector<float> unit(static_cast<size_t>(2 * tokens * heads * key_dim));
  float* const unit_q = unit.data();
  float* const unit_k = unit_q + tokens * heads * key_dim;
  const float scale = 1 / std::sqrt(static_cast<float>(key_dim));
  for (int64_t i = 0; i < tokens * heads; ++i) {
    Normalise(q.typed_data() + i * key_dim, key_dim, eps, scale, unit_q + i * key_dim);
    Normalise(k.typed_data() + i * key_dim, key_dim, eps, 1, unit_k + i * key_dim);
  }
  int64_t wide = ChosenKernels().delta_columns;  // whole columns, if there are some that divide
  while (wide > kDeltaColumns && value_dim % wide != 0) wide /= 2;
  const int64_t parts = (value_dim + wide - 1) / wide;
  const auto work = [&](int64_t item) {
    const int64_t begin = item % parts * wide, of = item / parts;  // columns, matrix
    const int64_t member = of % group, head = of / group % heads, i = of / group / heads;
    const int64_t start = starts.typed_data()[i], len = lens.typed_data()[i];
    if (len == 0) return;
    const int64_t columns = std::min(wide, value_dim - begin);
    const int64_t size = key_dim * wide;
    const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(size)]);
    float* const state = scratch.get();
    float value[kMostDeltaColumns] = {}, o[kMostDeltaColumns];
    const auto row_of = [&](int64_t row) {
      return to + ((row * heads + head) * group + member) * matrix + begin;
    };
    const bool is_whole = columns == wide, goes_on = is_new.typed_data()[i] == 0;
    if (!is_whole || !goes_on) std::fill_n(state, size, 0.0f);
    if (goes_on && !is_whole) {
      const float* from = row_of(rows.typed_data()[i]);
      for (int64_t r = 0; r < key_dim; ++r) {
        std::copy_n(from + r * value_dim, columns, state + r * wide);
      }
    }
    for (int64_t n = 0; n < len; ++n) {
      // Whole columns are read from the pool, and the last ones written to it, without a copy.
      const bool reads = n == 0 && goes_on && is_whole;
      const bool writes = n + 1 == len && is_whole && num_targets > 0 &&
                          runs.Reached(i, 0) == len && runs.Target(i, 0) < num_rows;
      const float* from = reads ? row_of(rows.typed_data()[i]) : state;
      float* next = writes ? row_of(runs.Target(i, 0)) : state;
      const int64_t from_step = reads ? value_dim : wide;
      const int64_t next_step = writes ? value_dim : wide;
      const int64_t at = (start + n) * heads + head, one = at * group + member;
      std::copy_n(v.typed_data() + one * value_dim + begin, columns, value);
      ChosenKernels().delta({key_dim, wide, unit_q + at * key_dim, unit_k + at * key_dim, value,
                             g.typed_data()[one], beta.typed_data()[one], from, next, from_step,
                             next_step, o});
      std::copy_n(o, columns, out->typed_data() + one * value_dim + begin);
      for (int64_t j = writes ? 1 : 0; j < num_targets; ++j) {
        const int64_t target = runs.Target(i, j);
        if (runs.Reached(i, j) != n + 1 || target >= num_rows) continue;
        float* kept = row_of(target);
        for (int64_t r = 0; r < key_dim; ++r) {
          std::copy_n(next + r * next_step, columns, kept + r * value_dim);
        }
      }
    }
  };
  ParallelFor(
      sequences * heads * group * parts, ThreadsFor(threads, computed * heads * group * matrix),
      [&](auto task) { threads.Schedule(std::move(task)); }, work);
  return ffi::Error::Success();
}

// One token of a sequence that goes on from `tail`, which a target may be: the same sums as below.
template <int64_t kLength>
void ConvolveOne(const float* x, const float* weight, int64_t channels, const float* tail,
                 const std::vector<float*>& targets, float* out) {
  for (int64_t c = 0; c < channels; ++c) {
    float inputs[kLength + 1], sum = 0;
    std::copy_n(tail + c * kLength, kLength, inputs);
    inputs[kLength] = x[c];
    for (int64_t j = 0; j <= kLength; ++j) sum += weight[c * (kLength + 1) + j] * inputs[j];
    out[c] = sum;
    for (float* const to : targets) std::copy_n(inputs + 1, kLength, to + c * kLength);
  }
}

// y[t] = sum over j of weight[j] * x[t - taps + 1 + j], from the oldest input to the newest. A state is
// the last taps - 1 inputs of each channel, whose axis may be several. The result is the pool itself;
// outputs of tokens that are no sequence's are zero.
ffi::Error CausalConv(ffi::ThreadPool threads, F32 x, F32 weight, F32 pool, S32 starts, S32 lens, S32 rows,
                      S32 is_new, S32 targets, S32 reached, ffi::Result<F32> out, ffi::Result<F32> states) {
  const Runs runs{starts, lens, rows, is_new, targets, reached};
  if (Rank(x) != 2 || !SameShape(x, *out) || Rank(weight) != 2 || Rank(pool) < 3 ||
      !SameShape(pool, *states) || !runs.Fit()) {
    return Reject("causal conv: shapes");
  }
  const auto sizes = pool.dimensions();
  const int64_t tokens = Dim(x, 0), channels = Dim(x, 1), taps = Dim(weight, 1), length = taps - 1;
  const int64_t num_rows = Dim(pool, 0), num_targets = runs.NumTargets(), size = channels * length;
  if (taps < 1 || Dim(weight, 0) != channels || 
      std::accumulate(sizes.begin() + 1, sizes.end() - 1, int64_t{1}, std::multiplies<>()) != channels ||
      sizes.back() != length) {
    return Reject("causal conv: sizes");
  }
  int64_t computed = 0;
  if (const char* why = runs.Outside(tokens, num_rows, computed)) {
    return Reject((std::string("causal conv: ") + why).c_str());
  }
  float* to = states->typed_data();
  if (to != pool.typed_data()) std::memcpy(to, pool.typed_data(), pool.size_bytes());
  const auto one = length == 3 ? ConvolveOne<3> : length == 2 ? ConvolveOne<2> : nullptr;
  if (one && tokens == 1 && runs.Count() == 1 && computed == 1 && is_new.typed_data()[0] == 0) {
    const float* tail = to + rows.typed_data()[0] * size;
    std::vector<float*> kept;
    for (int64_t j = 0; j < num_targets; ++j) {
      const int64_t target = runs.Target(0, j);
      if (target < num_rows && runs.Reached(0, j) == 1) kept.push_back(to + target * size);
    }
    const auto work = [&](int64_t item) {
      const int64_t begin = item * kConvChannels, count = std::min(kConvChannels, channels - begin);
      std::vector<float*> targets = kept;
      for (float*& target : targets) target += begin * length;
      one(x.typed_data() + begin, weight.typed_data() + begin * taps, count, tail + begin * length,
          targets, out->typed_data() + begin);
    };
    // All of it is read from memory, unlike what other operations count: a thread is worth it sooner.
    ParallelFor((channels + kConvChannels - 1) / kConvChannels, ThreadsFor(threads, 4 * channels * taps),
                [&](auto task) { threads.Schedule(std::move(task)); }, work);
    return ffi::Error::Success();
  }
  std::fill_n(out->typed_data(), x.element_count(), 0.0f);
  // Taps and tails with the channels side by side.
  std::vector<float> w(static_cast<size_t>(taps * channels)), tails(static_cast<size_t>(runs.Count() * size));
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t j = 0; j < taps; ++j) {
      w[static_cast<size_t>(j * channels + c)] = weight.typed_data()[c * taps + j];
    }
  }
  for (int64_t i = 0; i < runs.Count(); ++i) {  // all of them before any is written
    if (lens.typed_data()[i] == 0 || is_new.typed_data()[i] != 0) continue;
    const float* from = to + rows.typed_data()[i] * size;
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t j = 0; j < length; ++j) {
        tails[static_cast<size_t>(i * size + j * channels + c)] = from[c * length + j];
      }
    }
  }
  for (int64_t i = 0; i < runs.Count(); ++i) {
    const int64_t start = starts.typed_data()[i], len = lens.typed_data()[i];
    // The input of all channels at a number that counts from the sequence's first token here.
    const auto input = [&](int64_t n) {
      return n >= 0 ? x.typed_data() + (start + n) * channels
                    : tails.data() + i * size + (length + n) * channels;
    };
    for (int64_t n = 0; n < len; ++n) {
      float* y = out->typed_data() + (start + n) * channels;
      std::fill_n(y, channels, 0.0f);
      for (int64_t j = 0; j < taps; ++j) {
        const float *from = input(n - length + j), *by = w.data() + j * channels;
        for (int64_t c = 0; c < channels; ++c) y[c] += by[c] * from[c];
      }
    }
    for (int64_t j = 0; j < num_targets && len > 0; ++j) {
      const int64_t target = runs.Target(i, j), after = runs.Reached(i, j);
      if (target >= num_rows || after < 1 || after > len) continue;
      for (int64_t n = 0; n < length; ++n) {
        const float* from = input(after - length + n);
        for (int64_t c = 0; c < channels; ++c) to[target * size + c * length + n] = from[c];
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_causal_conv, CausalConv,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>()
                    .Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Ret<F32>().Ret<F32>());
ROOFLAX_HANDLER(rooflax_delta_rule, DeltaRule,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
                    .Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>()
                    .Arg<S32>().Ret<F32>().Ret<F32>().Attr<float>("eps"));

}  // namespace rooflax
