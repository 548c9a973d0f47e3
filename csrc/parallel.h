// Work shared between the calling thread and XLA's pool.
#ifndef ROOFLAX_PARALLEL_H_
#define ROOFLAX_PARALLEL_H_

#include <atomic>
#include <cstdint>
#include <memory>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rooflax {

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Runs work(i) for i in [0, count), on the caller and on up to num_threads - 1 tasks of the pool.
//
// The caller takes items like everyone else, and waits only for tasks that hold one: a task that the
// pool starts late finds nothing left. So a full pool never stops it. `schedule` takes a callable.
template <typename Schedule, typename Work>
void ParallelFor(int64_t count, int64_t num_threads, const Schedule& schedule, const Work& work) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> active{0};
  };
  if (count <= 1 || num_threads <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  auto state = std::make_shared<State>();
  const Work* shared = &work;  // alive while anyone holds an item
  auto take = [state, shared, count] {
    state->active.fetch_add(1);
    for (int64_t i = state->next.fetch_add(1); i < count; i = state->next.fetch_add(1)) {
      (*shared)(i);
    }
    state->active.fetch_sub(1);
  };
  const int64_t helpers = (num_threads < count ? num_threads : count) - 1;
  for (int64_t t = 0; t < helpers; ++t) schedule(take);
  take();
  while (state->active.load() != 0) Pause();
}

}  // namespace rooflax

#endif  // ROOFLAX_PARALLEL_H_
