// Threads of our own, for what runs outside XLA.
#ifndef ROOFLAX_THREADS_H_
#define ROOFLAX_THREADS_H_

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace rooflax {

// Runs part(begin, end) for as many parts of `count` as there are threads, one of which is the caller's.
template <typename Part>
void InParts(int64_t count, int threads, const Part& part) {
  const int64_t parts = std::max(1, threads);
  std::vector<std::thread> others;
  for (int64_t i = 1; i < parts; ++i) {
    others.emplace_back([&part, count, parts, i] { part(count * i / parts, count * (i + 1) / parts); });
  }
  part(0, count / parts);
  for (auto& other : others) other.join();
}

}  // namespace rooflax

#endif  // ROOFLAX_THREADS_H_
