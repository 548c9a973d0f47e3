#include "mask_exchange.h"

#include <algorithm>
#include <chrono>
#include <unordered_map>

namespace rooflax {

// The host never takes this long: a thread of it has gone.
static constexpr std::chrono::seconds kLongestWait{60};

struct Registry {
  std::mutex mutex;
  std::unordered_map<int32_t, std::shared_ptr<MaskExchange>> exchanges;
  int32_t latest = 0;
};

static Registry& TheRegistry() {
  static auto* registry = new Registry;  // also there while the process ends
  return *registry;
}

void MaskExchange::Begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_open_ = true;
  tokens_of_ = -1;
  masks_of_ = 0;
}

void MaskExchange::End() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_open_ = false;
  changed_.notify_all();
}

bool MaskExchange::AwaitTokens(int64_t step) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return !is_open_ || tokens_of_ >= step; });
  return tokens_of_ >= step;
}

void MaskExchange::PublishMasks(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  masks_of_ = step;
  changed_.notify_all();
}

bool MaskExchange::AwaitMasks(int64_t step) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, kLongestWait, [&] { return !is_open_ || masks_of_ >= step; }) &&
         is_open_;
}

void MaskExchange::PublishTokens(int64_t step, const int32_t* chosen, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::copy_n(chosen, std::min(count, rows), tokens.data());
  tokens_of_ = step;
  changed_.notify_all();
}

std::shared_ptr<MaskExchange> FindMaskExchange(int32_t number) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.exchanges.find(number);
  return found == registry.exchanges.end() ? nullptr : found->second;
}

}  // namespace rooflax

// The host's side: calls by number; those that wait or may be rejected say whether they could.
extern "C" {

#define ROOFLAX_HOST __attribute__((visibility("default")))

ROOFLAX_HOST int32_t rooflax_masks_new(int64_t rows, int64_t slots, int64_t words) {
  if (rows < 1 || slots < 1 || words < 1) return 0;
  auto made = std::make_shared<rooflax::MaskExchange>(rows, slots, words);
  rooflax::Registry& registry = rooflax::TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.exchanges[++registry.latest] = std::move(made);
  return registry.latest;
}

ROOFLAX_HOST void rooflax_masks_delete(int32_t number) {
  rooflax::Registry& registry = rooflax::TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.exchanges.erase(number);
}

ROOFLAX_HOST int32_t* rooflax_masks_words(int32_t number) {
  const auto found = rooflax::FindMaskExchange(number);
  return found ? found->masks.data() : nullptr;
}

ROOFLAX_HOST int32_t* rooflax_masks_tokens(int32_t number) {
  const auto found = rooflax::FindMaskExchange(number);
  return found ? found->tokens.data() : nullptr;
}

ROOFLAX_HOST void rooflax_masks_begin(int32_t number) {
  if (const auto found = rooflax::FindMaskExchange(number)) found->Begin();
}

ROOFLAX_HOST void rooflax_masks_end(int32_t number) {
  if (const auto found = rooflax::FindMaskExchange(number)) found->End();
}

ROOFLAX_HOST int rooflax_masks_await_tokens(int32_t number, int64_t step) {
  const auto found = rooflax::FindMaskExchange(number);
  return found && found->AwaitTokens(step);
}

ROOFLAX_HOST void rooflax_masks_publish(int32_t number, int64_t step) {
  if (const auto found = rooflax::FindMaskExchange(number)) found->PublishMasks(step);
}

}  // extern "C"
