// The next token of one row, as `sample` in ops/sampling.py says it: penalties and bias, what may not be
// chosen, then temperature, top-k, top-p and min-p, and a draw by noise.
#ifndef ROOFLAX_SAMPLE_H_
#define ROOFLAX_SAMPLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels.h"

namespace rooflax {

constexpr float kBanned = -std::numeric_limits<float>::infinity();

// What a slot's sequence wants, laid out as ops/sampling_columns.py says. Lists of ids are padded with
// -1, those of the bias with a bias of 0.
struct SamplingRow {
  static constexpr int64_t kBias = 1024, kAllowed = 1024, kStop = 32;
  float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  uint32_t seed, sample_index;
  int32_t top_k, num_logprobs, min_position, scores_adjusted, is_masked;
  int32_t bias_ids[kBias];
  float bias_values[kBias];
  int32_t allowed[kAllowed], stop[kStop];

  bool penalises() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
  bool filters() const { return top_k > 0 || top_p < 1 || min_p > 0; }
  bool has_bias() const {
    return std::any_of(bias_values, bias_values + kBias, [](float value) { return value != 0; });
  }
  bool is_limited() const {
    return std::any_of(allowed, allowed + kAllowed, [](int32_t id) { return id != -1; });
  }
};

// A row on its way: what is known of it, and room for two copies of its logits.
struct SampledRow {
  const SamplingRow& params;
  const float* logits;  // [vocab]
  int64_t vocab;
  int32_t position;  // that the new token will have
  const bool* in_prompt;  // [vocab]
  const int32_t* generated;  // [vocab], how often
  const int32_t* mask;  // bits of the tokens that a masked row may choose; or null
  const int32_t* pending;  // tokens that `generated` does not have yet; -1 is none
  int64_t num_pending;
  float *adjusted, *work;  // [vocab], scratch

  bool knows(int32_t id) const { return id >= 0 && id < vocab; }
  bool adjusts() const {
    return params.scores_adjusted > 0 || params.penalises() || params.has_bias() || params.is_limited() ||
           params.is_masked > 0 || position < params.min_position;
  }
};

struct SampledToken {
  int32_t token;
  bool is_finite, is_allowed;
  float logprob;
};

// The largest of a row, largest first and the first of equals first, in expected time O(columns):
// values above the least of the best so far are gathered until there are twice as many as wanted.
inline void TopOfRow(const float* x, int64_t columns, int64_t wanted, float* values, int32_t* ids) {
  static thread_local std::vector<int32_t> best;
  best.resize(std::max(best.size(), static_cast<size_t>(2 * wanted)));
  const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  float least = kBanned;
  int64_t count = 0;
  for (int64_t at = 0; at < columns;) {
    count += ChosenKernels().above(x, &at, columns, least, best.data() + count, 2 * wanted - count);
    if (count > wanted) {
      std::nth_element(best.begin(), best.begin() + wanted - 1, best.begin() + count, before);
      count = wanted;
      least = x[best[static_cast<size_t>(wanted - 1)]];
    }
  }
  std::sort(best.begin(), best.begin() + count, before);
  for (int64_t i = 0; count < wanted; ++i) {  // the rest is -inf, or not a number
    if (!(x[i] > kBanned)) best[static_cast<size_t>(count++)] = static_cast<int32_t>(i);
  }
  for (int64_t i = 0; i < wanted; ++i) {
    ids[i] = best[static_cast<size_t>(i)];
    values[i] = x[ids[i]];
  }
}

// out = log softmax of the logits.
inline void Logprobs(const SampledRow& row, float largest, float* out) {
  const float total = std::log(ChosenKernels().exp_total(row.logits, row.vocab, largest));
  for (int64_t v = 0; v < row.vocab; ++v) out[v] = row.logits[v] - largest - total;
}

// Penalties and the bias, on what `adjusted` holds.
inline void Penalise(const SampledRow& row) {
  const SamplingRow& w = row.params;
  const auto penalised = [&](float x, bool in_prompt, int64_t count) {
    if (in_prompt || count > 0) x = x > 0 ? x / w.repetition_penalty : x * w.repetition_penalty;
    if (count > 0) x -= w.presence_penalty;
    return x - w.frequency_penalty * static_cast<float>(count);
  };
  if (w.penalises()) {
    const int32_t* end = row.pending + row.num_pending;
    std::vector<float> before;  // of the pending tokens
    for (const int32_t* id = row.pending; id != end; ++id) {
      before.push_back(row.knows(*id) ? row.adjusted[*id] : 0);
    }
    for (int64_t v = 0; v < row.vocab; ++v) {
      row.adjusted[v] = penalised(row.adjusted[v], row.in_prompt[v], row.generated[v]);
    }
    for (const int32_t* id = row.pending; id != end; ++id) {
      if (!row.knows(*id)) continue;
      const int64_t count = row.generated[*id] + int64_t{std::count(row.pending, end, *id)};
      const float unchanged = before[static_cast<size_t>(id - row.pending)];
      row.adjusted[*id] = penalised(unchanged, row.in_prompt[*id], count);
    }
  }
  for (int64_t i = 0; i < SamplingRow::kBias; ++i) {
    if (w.bias_values[i] != 0 && row.knows(w.bias_ids[i])) {
      row.adjusted[w.bias_ids[i]] += w.bias_values[i];
    }
  }
}

// -inf in `adjusted` for what the row may not choose.
inline void Ban(const SampledRow& row) {
  const SamplingRow& w = row.params;
  if (w.is_limited()) {
    float kept[SamplingRow::kAllowed];
    for (int64_t i = 0; i < SamplingRow::kAllowed; ++i) {
      kept[i] = row.knows(w.allowed[i]) ? row.adjusted[w.allowed[i]] : 0;
    }
    std::fill(row.adjusted, row.adjusted + row.vocab, kBanned);
    for (int64_t i = 0; i < SamplingRow::kAllowed; ++i) {
      if (row.knows(w.allowed[i])) row.adjusted[w.allowed[i]] = kept[i];
    }
  }
  if (row.position < w.min_position) {
    for (int32_t id : w.stop) {
      if (row.knows(id)) row.adjusted[id] = kBanned;
    }
  }
  if (w.is_masked > 0 && row.mask != nullptr) {
    for (int64_t v = 0; v < row.vocab; ++v) {
      const auto word = static_cast<uint32_t>(row.mask[v / 32]);
      if ((word >> (v % 32) & 1) == 0) row.adjusted[v] = kBanned;
    }
  }
}

// `adjusted` from the logits, or with scores_adjusted from their log-probabilities.
inline void Adjust(const SampledRow& row, float largest) {
  if (row.params.scores_adjusted > 0) {
    Logprobs(row, largest, row.adjusted);
  } else {
    std::copy(row.logits, row.logits + row.vocab, row.adjusted);
  }
  Penalise(row);
  Ban(row);
}

// The tokens that survive the filters: those above `least`, and of its equals those up to `last`.
struct Survivors {
  float least = kBanned;
  int64_t last = std::numeric_limits<int64_t>::max();

  bool have(float x, int64_t id) const { return x > least || (x == least && id <= last); }
};

// Logits below the largest from which no noise leads to the top: noise lies between -2.9 and 16.7.
constexpr float kHopeless = 20;

// Of the tokens, most likely first, those before which less than `limit` has come: of weights, or
// without them of ones. `total` is of all tokens. Levels part what the last of them lies in, until it
// is a few tokens, or alike ones; those are sorted.
inline Survivors SurvivorsWithin(const float* x, const float* weights, int64_t vocab, float largest,
                                 double total, double limit) {
  constexpr double kFew = 1024;
  constexpr int64_t kBlock = 32;
  float high = largest, low = largest - kHopeless;
  if (weights != nullptr) {  // less likely tokens all together would not be what the limit leaves out
    const double left = (total - limit) / static_cast<double>(vocab);
    low = std::max(low, largest + static_cast<float>(std::log(std::max(left, 1e-30))) - 1);
  }
  const auto lower = [](float value) { return std::nextafter(value, kBanned); };
  low = std::min(low, lower(high));
  double above = 0, within = total;  // high and low
  const auto is_few = [&] {
    const double least = weights == nullptr ? 1 : std::exp(static_cast<double>(low) - largest);
    return within - above <= kFew * least;
  };
  constexpr float kAlike = 1e-9f;  // weights are equal; near 0 there are far more floats than that
  while (lower(high) > low && high - low > kAlike && !is_few()) {
    float levels[kLevels];
    double sums[kLevels];
    for (int64_t l = 0; l < kLevels; ++l) {
      const double share = static_cast<double>(l + 1) / (kLevels + 1);
      levels[l] = static_cast<float>(low + (static_cast<double>(high) - low) * share);
    }
    ChosenKernels().sums_above(x, weights, vocab, levels, sums);
    for (int64_t l = 0; l < kLevels; ++l) {
      if (sums[l] < limit) {
        high = levels[l];
        above = sums[l];
        break;
      }
      low = levels[l];
      within = sums[l];
    }
  }
  static thread_local std::vector<int32_t> ids;
  ids.clear();
  const auto is_between = [&](int64_t v) { return (x[v] > low) & (x[v] <= high); };
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, vocab);
    int any = 0;
    for (int64_t v = begin; v < end; ++v) any |= is_between(v);
    if (any == 0) continue;
    for (int64_t v = begin; v < end; ++v) {
      if (is_between(v)) ids.push_back(static_cast<int32_t>(v));
    }
  }
  const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  if (!std::is_sorted(ids.begin(), ids.end(), before)) std::sort(ids.begin(), ids.end(), before);
  Survivors found{high, -1};
  for (const int32_t id : ids) {
    if (!(above < limit)) break;
    found = {x[id], id};
    above += weights == nullptr ? 1 : weights[id];
  }
  return found;
}

// Of no more than so many tokens top-k takes the best and sorts them.
constexpr int32_t kSortedTopK = 1024;

// What survives a top-k of few tokens, and top-p and min-p after it.
inline Survivors FewSurvivors(const SamplingRow& w, const float* x, int64_t vocab) {
  static thread_local std::vector<float> values, weights;
  static thread_local std::vector<int32_t> ids;
  const int64_t count = std::min<int64_t>(w.top_k, vocab);
  values.resize(static_cast<size_t>(count));
  weights.resize(values.size());
  ids.resize(values.size());
  TopOfRow(x, vocab, count, values.data(), ids.data());
  const double total = ChosenKernels().exp_each(values.data(), count, values[0], weights.data());
  size_t kept = 1;
  for (double before = weights[0]; kept < values.size(); ++kept) {
    if (!(w.top_p >= 1 || before < w.top_p * total) || weights[kept] < w.min_p) break;
    before += weights[kept];
  }
  return {values[kept - 1], ids[kept - 1]};
}

// What survives top-k, top-p over what top-k kept, and min-p.
inline Survivors Filter(const SamplingRow& w, const float* x, int64_t vocab, float largest) {
  if (w.top_k > 0 && w.top_k <= kSortedTopK) return FewSurvivors(w, x, vocab);
  Survivors found;
  if (w.top_k > 0 && w.top_k < vocab) {
    const auto all = static_cast<double>(vocab);
    found = SurvivorsWithin(x, nullptr, vocab, largest, all, w.top_k);
  }
  if (w.top_p < 1) {
    static thread_local std::vector<float> weights;
    weights.resize(std::max(weights.size(), static_cast<size_t>(vocab)));
    const double all = ChosenKernels().exp_each(x, vocab, largest, weights.data());
    double total = all;
    if (found.least > kBanned) {
      total = 0;
      for (int64_t v = 0; v < vocab; ++v) total += found.have(x[v], v) ? weights[static_cast<size_t>(v)] : 0;
    }
    const double limit = std::max(w.top_p * total, std::numeric_limits<double>::min());
    found = SurvivorsWithin(x, weights.data(), vocab, largest, all, limit);
  }
  if (w.min_p > 0) {
    const float least = std::min(largest, largest + std::log(w.min_p));
    if (least > found.least) found = {least};
  }
  return found;
}

// argmax of what survives of x / temperature, plus noise.
inline int32_t Draw(const SampledRow& row, const float* x) {
  const SamplingRow& w = row.params;
  const Kernels& kernels = ChosenKernels();
  if (w.temperature != 1) {
    for (int64_t v = 0; v < row.vocab; ++v) row.work[v] = x[v] / w.temperature;
    x = row.work;
  }
  const int64_t first = kernels.argmax(x, row.vocab);
  if (!std::isfinite(x[first])) return static_cast<int32_t>(first);
  const Survivors kept = w.filters() ? Filter(w, x, row.vocab, x[first]) : Survivors{};
  return static_cast<int32_t>(
      kernels.draw({{w.seed, w.sample_index}, static_cast<uint32_t>(row.position), x, row.vocab,
                    kept.least, kept.last, first}));
}

// What the row chooses; `count` most likely tokens where it asks for log-probabilities, else zeros.
inline SampledToken SampleRow(const SampledRow& row, int64_t count, int32_t* top, float* top_logprobs) {
  const SamplingRow& w = row.params;
  const Kernels& kernels = ChosenKernels();
  const int64_t best = kernels.argmax(row.logits, row.vocab);
  const float largest = row.logits[best];
  std::fill(top, top + count, 0);
  std::fill(top_logprobs, top_logprobs + count, 0.0f);
  SampledToken found{static_cast<int32_t>(best), std::isfinite(largest), true, 0};
  if (!found.is_finite) return found;
  const float* x = row.logits;
  if (row.adjusts()) {
    Adjust(row, largest);
    x = row.adjusted;
  }
  found.token = w.temperature > 0 ? Draw(row, x) : static_cast<int32_t>(kernels.argmax(x, row.vocab));
  found.is_allowed = x[found.token] != kBanned;
  found.is_finite = std::isfinite(x[found.token]) || !found.is_allowed;
  if (w.num_logprobs < 0) return found;
  if (w.scores_adjusted <= 0) {
    Logprobs(row, largest, row.work);
    x = row.work;
  }
  found.logprob = x[found.token];
  TopOfRow(x, row.vocab, count, top_logprobs, top);
  return found;
}

}  // namespace rooflax

#endif  // ROOFLAX_SAMPLE_H_
