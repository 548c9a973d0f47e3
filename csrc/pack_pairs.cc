// Matrices of bfloat16 as panels of pairs, by threads.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "threads.h"

namespace rooflax {
namespace {

// Rows [32 block, 32 block + 32) of w, [inner, outer].
void PackBlock(const uint16_t* w, int64_t inner, int64_t outer, int64_t block, uint16_t* to) {
  const int64_t panel_numbers = NumTermBlocks(inner) * kTermBlock * kPanel;
  for (int64_t pair = 0; pair < kTermBlock / 2; ++pair) {
    const int64_t k = block * kTermBlock + 2 * pair;
    const uint16_t* first = w + k * outer;
    for (int64_t n = 0; n < outer; n += kPanel) {
      uint16_t halves[2][kPanel] = {};
      const auto count = static_cast<size_t>(std::min(kPanel, outer - n));
      for (int64_t i = 0; i < 2 && k + i < inner; ++i) std::memcpy(halves[i], first + i * outer + n, 2 * count);
      uint32_t pairs[kPanel];
      for (int64_t i = 0; i < kPanel; ++i) pairs[i] = halves[0][i] | static_cast<uint32_t>(halves[1][i]) << 16;
      uint16_t* panel = to + n / kPanel * panel_numbers + block * kTermBlock * kPanel;
      std::memcpy(panel + pair * 2 * kPanel, pairs, sizeof(pairs));
    }
  }
}

}  // namespace
}  // namespace rooflax

// w [inner, outer] to panels of pairs, all of which is written.
extern "C" __attribute__((visibility("default"))) void rooflax_pack_pairs(
    const uint16_t* w, int64_t inner, int64_t outer, uint16_t* to, int threads) {
  using namespace rooflax;
  InParts(NumTermBlocks(inner), threads, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) PackBlock(w, inner, outer, block, to);
  });
}
