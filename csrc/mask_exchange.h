// Masks of constrained rows, made on the host while the device computes.
//
// A mask follows from every token before it. So the sampler of a decode loop publishes the tokens that
// it chose, a thread of the host makes the masks of the next step while its layers run, and the next
// sampler waits for them. Steps are numbered from 0; the masks of step 0 come with the step's input.
#ifndef ROOFLAX_MASK_EXCHANGE_H_
#define ROOFLAX_MASK_EXCHANGE_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace rooflax {

class MaskExchange {
 public:
  MaskExchange(int64_t rows, int64_t slots, int64_t words)
      : rows(rows), slots(slots), words(words), tokens(rows), masks(slots * words) {}

  // The host begins a dispatch, and ends it once its result is there.
  void Begin();
  void End();
  // Waits for the tokens of a step; false once the dispatch has ended.
  bool AwaitTokens(int64_t step);
  void PublishMasks(int64_t step);

  // The sampler waits for the masks of a step; false if there is no dispatch, or they do not come.
  bool AwaitMasks(int64_t step);
  void PublishTokens(int64_t step, const int32_t* chosen, int64_t count);

  const int64_t rows, slots, words;
  std::vector<int32_t> tokens;  // the latest of each row
  std::vector<int32_t> masks;   // [slots, words]

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
  int64_t tokens_of_ = -1, masks_of_ = 0;  // the latest steps
};

// The exchange of a number that the host was given; null if there is none.
std::shared_ptr<MaskExchange> FindMaskExchange(int32_t number);

}  // namespace rooflax

#endif  // ROOFLAX_MASK_EXCHANGE_H_
