// Work shared between the calling thread and XLA's pool.
//
// Waking a sleeping thread costs as much as a small matmul, and a decode step has dozens of those.
// So a pool task that has helped once stays for a moment and watches for the next piece of work.
#ifndef ROOFLAX_PARALLEL_H_
#define ROOFLAX_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rooflax {

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// How long a helper watches for more work before it gives its thread back.
constexpr std::chrono::microseconds kLinger{50};

// One job at a time, on a board that helpers watch. Nothing here is ever freed.
//
// A helper counts itself active and looks again whether the job is still open; the owner closes the
// job and then waits until nobody is active. So a job's memory is touched only while it is open.
class Team {
 public:
  // Shares run(context, i) for i in [0, count) with whoever is watching; false if another job is on.
  template <typename Summon>
  bool Share(int64_t count, int64_t helpers, void (*run)(const void*, int64_t),
             const void* context, const Summon& summon) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    run_.store(run, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    epoch_.fetch_add(1);  // odd: open
    for (int64_t here = watching_.load(); here < helpers; ++here) summon();
    Take();
    epoch_.fetch_add(1);
    while (active_.load() != 0) Pause();
    busy_.store(false, std::memory_order_release);
    return true;
  }

  // What a pool task does: helps until nothing has come for a while.
  void Watch() {
    watching_.fetch_add(1);
    auto last = std::chrono::steady_clock::now();
    uint64_t done = 0;
    for (int64_t turn = 1;; ++turn) {
      const uint64_t epoch = epoch_.load();
      if (epoch % 2 == 1 && epoch != done) {
        done = epoch;
        active_.fetch_add(1);
        if (epoch_.load() == epoch) Take();
        active_.fetch_sub(1);
        last = std::chrono::steady_clock::now();
      } else if (turn % 64 == 0 && std::chrono::steady_clock::now() - last > kLinger) {
        break;
      }
      Pause();
    }
    watching_.fetch_sub(1);
  }

 private:
  void Take() {
    auto* run = run_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    const int64_t count = count_.load(std::memory_order_relaxed);
    for (int64_t i = next_.fetch_add(1); i < count; i = next_.fetch_add(1)) run(context, i);
  }

  std::atomic<uint64_t> epoch_{0};
  std::atomic<int64_t> next_{0}, count_{0}, active_{0}, watching_{0};
  std::atomic<void (*)(const void*, int64_t)> run_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<bool> busy_{false};
};

inline Team& TheTeam() {
  static Team team;
  return team;
}

// Runs work(i) for i in [0, count), on the caller and on up to num_threads - 1 tasks of the pool.
//
// The caller takes items like everyone else, and waits only for tasks that hold one: a task that the
// pool starts late finds nothing left. So a full pool never stops it. `schedule` takes a callable.
template <typename Schedule, typename Work>
void ParallelFor(int64_t count, int64_t num_threads, const Schedule& schedule, const Work& work) {
  const int64_t helpers = (num_threads < count ? num_threads : count) - 1;
  const auto run = [](const void* context, int64_t i) { (*static_cast<const Work*>(context))(i); };
  const auto summon = [&] { schedule([] { TheTeam().Watch(); }); };
  if (helpers > 0 && TheTeam().Share(count, helpers, run, &work, summon)) return;
  for (int64_t i = 0; i < count; ++i) work(i);
}

// Where pieces of `units` end, in multiples of `unit` and none shorter than `least`: each takes one
// `share`-th of what is left, so that long ones stream and short ones at the end let threads finish together.
inline std::vector<int64_t> Pieces(int64_t units, int64_t unit, int64_t least, int64_t share) {
  std::vector<int64_t> ends;
  for (int64_t begin = 0; begin < units; begin = ends.back()) {
    const int64_t wanted = (units - begin + share - 1) / share;
    const int64_t end = begin + std::max(least, (wanted + unit - 1) / unit * unit);
    ends.push_back(end + least > units ? units : end);
  }
  return ends;
}

// The same where each piece makes a copy of its own of what they share: half as many, and none very short.
inline std::vector<int64_t> FewPieces(int64_t units, int64_t unit, int64_t least, int64_t threads) {
  const int64_t shortest = (units / (4 * threads) + unit - 1) / unit * unit;
  return Pieces(units, unit, std::max(least, shortest), threads);
}

}  // namespace rooflax

#endif  // ROOFLAX_PARALLEL_H_
