// The sampler as an XLA custom call.

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ffi_common.h"
#include "mask_exchange.h"
#include "parallel.h"
#include "sample.h"

namespace rooflax {
namespace {

using S32 = ffi::Buffer<ffi::S32>;
using Pred = ffi::Buffer<ffi::PRED>;

// The widths of what comes in; the masks and the pending tokens may be absent.
struct Sizes {
  int64_t rows, vocab, slots, words, pending;
};

bool Fits(F32 logits, S32 params, S32 positions, Pred in_prompt, S32 generated, S32 slots, S32 masks,
          S32 pending, Sizes& s) {
  for (const S32* buffer : {&params, &generated, &masks, &pending}) {
    if (Rank(*buffer) != 2) return false;
  }
  if (Rank(logits) != 2 || Rank(in_prompt) != 2) return false;
  s = {Dim(logits, 0), Dim(logits, 1), Dim(params, 0), Dim(masks, 1), Dim(pending, 1)};
  const auto is = [](const auto& buffer, int64_t a, int64_t b) {
    return Dim(buffer, 0) == a && Dim(buffer, 1) == b;
  };
  return s.vocab > 0 && Dim(params, 1) * 4 == static_cast<int64_t>(sizeof(SamplingRow)) &&
         is(generated, s.slots, s.vocab) && is(in_prompt, s.slots, s.vocab) &&
         Rank(positions) == 1 && Dim(positions, 0) == s.rows && Rank(slots) == 1 &&
         Dim(slots, 0) == s.rows &&
         (s.words == 0 || is(masks, s.slots, (s.vocab + 31) / 32)) &&
         (s.pending == 0 || Dim(pending, 0) == s.rows);
}

// Who makes the masks of this step: nobody where the array is empty or names number 0. False if it does
// not fit the step's masks.
bool Exchange(S32 numbers, const Sizes& s, std::shared_ptr<MaskExchange>& host, int64_t& step) {
  if (numbers.element_count() == 0) return true;
  if (numbers.element_count() != 2) return false;
  const int32_t number = numbers.typed_data()[0];
  step = numbers.typed_data()[1];
  if (number == 0) return true;
  host = FindMaskExchange(number);
  return host && step >= 0 && s.words > 0 && host->slots == s.slots && host->words == s.words &&
         host->rows >= s.rows;
}

ffi::Error Sample(ffi::ThreadPool pool, F32 logits, S32 params, S32 positions, Pred in_prompt,
                  S32 generated, S32 slots, S32 masks, S32 pending, S32 num_rows, S32 exchange,
                  ffi::Result<S32> tokens, ffi::Result<Pred> is_finite, ffi::Result<Pred> is_allowed,
                  ffi::Result<F32> logprobs, ffi::Result<S32> top, ffi::Result<F32> top_logprobs) {
  Sizes s;
  if (!Fits(logits, params, positions, in_prompt, generated, slots, masks, pending, s) ||
      Rank(*top) != 2 || Dim(*top, 1) < 1 || Dim(*top, 1) > s.vocab || !SameShape(*top, *top_logprobs)) {
    return Reject("sample: shapes");
  }
  for (const size_t count : {tokens->element_count(), is_finite->element_count(),
                             is_allowed->element_count(), logprobs->element_count(),
                             static_cast<size_t>(Dim(*top, 0))}) {
    if (static_cast<int64_t>(count) != s.rows) return Reject("sample: shapes");
  }
  int64_t count = 0;
  if (!RealRows(num_rows, s.rows, count)) return Reject("sample: number of rows");
  TheComputed().sampled_rows.fetch_add(count, std::memory_order_relaxed);
  for (int64_t row = count; row < s.rows; ++row) {  // padding: token 0, and nothing is wrong
    const int64_t width = Dim(*top, 1);
    tokens->typed_data()[row] = 0;
    is_finite->typed_data()[row] = is_allowed->typed_data()[row] = true;
    logprobs->typed_data()[row] = 0;
    std::fill_n(top->typed_data() + row * width, width, 0);
    std::fill_n(top_logprobs->typed_data() + row * width, width, 0.0f);
  }
  std::shared_ptr<MaskExchange> host;
  int64_t step = 0;
  if (!Exchange(exchange, s, host, step)) return Reject("sample: a mask exchange that does not fit");
  for (int64_t row = 0; row < count; ++row) {
    const int32_t slot = slots.typed_data()[row];
    if (slot < 0 || slot >= s.slots) return Reject("sample: a slot that is not there");
  }
  const int32_t* allowed = s.words == 0 ? nullptr : masks.typed_data();
  if (host && step > 0) {
    if (!host->AwaitMasks(step)) return Reject("sample: masks that did not come");
    allowed = host->masks.data();
  }
  const auto sample_row = [&](int64_t row) {
    static thread_local std::vector<float> scratch;
    scratch.resize(std::max(scratch.size(), static_cast<size_t>(2 * s.vocab)));
    const int64_t slot = slots.typed_data()[row], at = slot * s.vocab, width = Dim(*top, 1);
    SamplingRow wanted;
    std::memcpy(&wanted, params.typed_data() + slot * Dim(params, 1), sizeof(wanted));
    const SampledToken found = SampleRow(
        {wanted, logits.typed_data() + row * s.vocab, s.vocab, positions.typed_data()[row],
         in_prompt.typed_data() + at, generated.typed_data() + at,
         allowed == nullptr ? nullptr : allowed + slot * s.words,
         pending.typed_data() + row * s.pending, s.pending, scratch.data(),
         scratch.data() + s.vocab},
        width, top->typed_data() + row * width, top_logprobs->typed_data() + row * width);
    tokens->typed_data()[row] = found.token;
    is_finite->typed_data()[row] = found.is_finite;
    is_allowed->typed_data()[row] = found.is_allowed;
    logprobs->typed_data()[row] = found.logprob;
  };
  ParallelFor(count, ThreadsFor(pool, count * s.vocab),
              [&](auto task) { pool.Schedule(std::move(task)); }, sample_row);
  if (host) host->PublishTokens(step, tokens->typed_data(), count);
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_sample, Sample,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<S32>().Arg<S32>().Arg<Pred>()
                    .Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>().Ret<S32>()
                    .Ret<Pred>().Ret<Pred>().Ret<F32>().Ret<S32>().Ret<F32>());

}  // namespace rooflax
