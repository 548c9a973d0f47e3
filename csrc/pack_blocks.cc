// Blocks of GGUF files as packed weights: rows anywhere in memory to panels, by threads. Codes and scales are
// moved, none is computed; what the packed layouts are stands in kernels.h and impl_blocks.h.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "threads.h"

namespace rooflax {
namespace {

constexpr uint32_t kLow = 0x0f0f0f0fu;

// A group of 32 codes: four inputs in the bytes of each number, and its scale.
struct Group {
  uint32_t quads[8];
  uint32_t shared;  // float16s: the group's own, or those of its block
  uint32_t own;  // kSuper: two bytes
};

uint32_t Word(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

uint32_t HalfAt(const uint8_t* from) { return static_cast<uint32_t>(from[0] | from[1] << 8); }

// Sixteen bytes, the first half of the codes in their low halves.
void Nibbles(const uint8_t* from, Group& group) {
  for (int q = 0; q < 4; ++q) {
    const uint32_t both = Word(from + q * 4);
    group.quads[q] = both & kLow;
    group.quads[4 + q] = both >> 4 & kLow;
  }
}

// Bits of 32 bytes, one of each code's: `bits` of them from `shift` on, up by `to`.
void Planes(const uint8_t* from, int shift, uint32_t bits, int to, Group& group) {
  const uint32_t mask = ((1u << bits) - 1u) * 0x01010101u;
  for (int q = 0; q < 8; ++q) group.quads[q] |= (Word(from + q * 4) >> shift & mask) << to;
}

// Four bytes with a bit for each code, its fifth.
void Fifth(const uint8_t* from, Group& group) {
  const uint32_t bits = Word(from);
  for (int q = 0; q < 8; ++q) {
    const uint32_t four = bits >> (q * 4);
    for (int j = 0; j < 4; ++j) group.quads[q] |= (four >> j & 1u) << (8 * j + 4);
  }
}

// Scales and minimums of six bits, of Q4_K and Q5_K.
uint32_t SixBits(const uint8_t* from, int g) {
  if (g < 4) return static_cast<uint32_t>((from[g] & 63) | (from[4 + g] & 63) << 8);
  const int low = from[4 + g] & 15, high = from[4 + g] >> 4;
  return static_cast<uint32_t>((low | (from[g - 4] >> 2 & 48)) | (high | (from[g] >> 2 & 48)) << 8);
}

// Scales of six bits less 32, of Q3_K: the i-th of sixteen.
uint32_t SixOf16(const uint8_t* from, int i) {
  const int low = from[i % 8] >> (i / 8 * 4) & 15, high = from[8 + i % 4] >> (i / 4 * 2) & 3;
  return (static_cast<uint32_t>(low | high << 4) - 32u) & 255u;
}

struct Q8_0 {
  static constexpr int64_t kBytes = 34, kGroups = 1;
  static void Read(const uint8_t* block, int, Group& group) {
    group.shared = HalfAt(block);
    std::memcpy(group.quads, block + 2, 32);
  }
};
struct Q4_0 {
  static constexpr int64_t kBytes = 18, kGroups = 1;
  static void Read(const uint8_t* block, int, Group& group) {
    group.shared = HalfAt(block);
    Nibbles(block + 2, group);
  }
};
struct Mxfp4 {
  static constexpr int64_t kBytes = 17, kGroups = 1;
  static void Read(const uint8_t* block, int, Group& group) {
    group.shared = block[0];
    Nibbles(block + 1, group);
  }
};
struct Q4_1 {
  static constexpr int64_t kBytes = 20, kGroups = 1;
  static void Read(const uint8_t* block, int, Group& group) {
    group.shared = Word(block);
    Nibbles(block + 4, group);
  }
};
struct Q5_0 {
  static constexpr int64_t kBytes = 22, kGroups = 1;
  static void Read(const uint8_t* block, int, Group& group) {
    group.shared = HalfAt(block);
    Nibbles(block + 6, group);
    Fifth(block + 2, group);
  }
};
struct Q5_1 {
  static constexpr int64_t kBytes = 24, kGroups = 1;
  static void Read(const uint8_t* block, int, Group& group) {
    group.shared = Word(block);
    Nibbles(block + 8, group);
    Fifth(block + 4, group);
  }
};
struct Q2K {
  static constexpr int64_t kBytes = 84, kGroups = 8;
  static void Read(const uint8_t* block, int g, Group& group) {
    group.shared = Word(block + 80);
    group.own = HalfAt(block + 2 * g);
    Planes(block + 16 + g / 4 * 32, g % 4 * 2, 2, 0, group);
  }
};
struct Q3K {
  static constexpr int64_t kBytes = 110, kGroups = 8;
  static void Read(const uint8_t* block, int g, Group& group) {
    group.shared = HalfAt(block + 108);
    group.own = SixOf16(block + 96, 2 * g) | SixOf16(block + 96, 2 * g + 1) << 8;
    Planes(block + 32 + g / 4 * 32, g % 4 * 2, 2, 0, group);
    Planes(block, g, 1, 2, group);
  }
};
struct Q4K {
  static constexpr int64_t kBytes = 144, kGroups = 8;
  static void Read(const uint8_t* block, int g, Group& group) {
    group.shared = Word(block);
    group.own = SixBits(block + 4, g);
    Planes(block + 16 + g / 2 * 32, g % 2 * 4, 4, 0, group);
  }
};
struct Q5K {
  static constexpr int64_t kBytes = 176, kGroups = 8;
  static void Read(const uint8_t* block, int g, Group& group) {
    group.shared = Word(block);
    group.own = SixBits(block + 4, g);
    Planes(block + 48 + g / 2 * 32, g % 2 * 4, 4, 0, group);
    Planes(block + 16, g, 1, 4, group);
  }
};
struct Q6K {
  static constexpr int64_t kBytes = 210, kGroups = 8;
  static void Read(const uint8_t* block, int g, Group& group) {
    group.shared = HalfAt(block + 208);
    group.own = HalfAt(block + 192 + 2 * g);
    Planes(block + g / 4 * 64 + g % 2 * 32, g % 4 / 2 * 4, 4, 0, group);
    Planes(block + 128 + g / 4 * 32, g % 4 * 2, 2, 4, group);
  }
};
struct Iq4Xs {
  static constexpr int64_t kBytes = 136, kGroups = 8;
  static void Read(const uint8_t* block, int g, Group& group) {
    group.shared = HalfAt(block);
    const uint32_t low = block[4 + g / 2] >> (g % 2 * 4) & 15u, high = HalfAt(block + 2) >> (2 * g) & 3u;
    group.own = ((low | high << 4) - 32u) & 255u;
    Nibbles(block + 8 + 16 * g, group);
  }
};

// A group's lines of `bits` bits, each `lane` of them.
void Lines(const Group& group, int64_t bits, int64_t lane, uint8_t* lines) {
  const auto put = [&](int64_t line, uint32_t word) { std::memcpy(lines + line * 64 + lane * 4, &word, 4); };
  if (bits == 8) {
    for (int q = 0; q < 8; ++q) put(q, group.quads[q]);
    return;
  }
  int64_t line = 0, low = bits / 4 * 4;
  for (int q = 0; low != 0 && q < 4; ++q) put(line++, (group.quads[q] & kLow) | (group.quads[4 + q] & kLow) << 4);
  for (int64_t width = 2; width > 0; width /= 2) {
    if (((bits - bits / 4 * 4) & width) == 0) continue;
    const int64_t each = 8 / width;
    const uint32_t mask = ((1u << width) - 1u) * 0x01010101u;
    for (int64_t i = 0; i < width; ++i) {
      uint32_t word = 0;
      for (int64_t t = 0; t < each; ++t) word |= (group.quads[i * each + t] >> low & mask) << (t * width);
      put(line++, word);
    }
    low += width;
  }
}

// How a code's scales are stored: bytes of a group's own, or words of supers.
struct Stored {
  int64_t bits;
  int64_t scale_bytes;  // 0 where groups share float16s
};

struct PackArgs {
  Stored stored;
  const uint64_t* rows;  // addresses; of outputs beyond them nothing is written
  int64_t num_rows, groups;
  uint8_t* values;
  uint8_t* scales;
};

template <typename Type>
void PackPanel(const PackArgs& a, int64_t panel) {
  constexpr int64_t kSuper = 8;
  const int64_t bits = a.stored.bits, lanes = std::min(kPanel, a.num_rows - panel * kPanel);
  uint8_t* values = a.values + panel * a.groups * bits * 64;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const auto* row = reinterpret_cast<const uint8_t*>(a.rows[panel * kPanel + lane]);
    for (int64_t g = 0; g < a.groups; ++g) {
      Group group{};
      Type::Read(row + g / Type::kGroups * Type::kBytes, static_cast<int>(g % Type::kGroups), group);
      Lines(group, bits, lane, values + g * bits * 64);
      if (const int64_t size = a.stored.scale_bytes; size != 0) {
        std::memcpy(a.scales + ((panel * a.groups + g) * kPanel + lane) * size, &group.shared, static_cast<size_t>(size));
        continue;
      }
      uint8_t* super = a.scales + (panel * (a.groups / kSuper) + g / kSuper) * (1 + kSuper / 2) * kPanel * 4;
      std::memcpy(super + lane * 4, &group.shared, 4);
      const int64_t i = g % kSuper;
      std::memcpy(super + ((1 + i / 2) * kPanel + lane) * 4 + i % 2 * 2, &group.own, 2);
    }
  }
}

template <typename Type>
void Pack(const PackArgs& a, int threads) {
  InParts((a.num_rows + kPanel - 1) / kPanel, threads, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) PackPanel<Type>(a, panel);
  });
}

}  // namespace
}  // namespace rooflax

// Rows of blocks of a GGUF type to a packed weight that fits it; whether the type is known. Rows have `groups`
// groups of 32, by eights where a block has eight. Codes and scales beyond the rows stay as they are.
extern "C" __attribute__((visibility("default"))) bool rooflax_pack_blocks(
    const char* type, const uint64_t* rows, int64_t num_rows, int64_t groups, uint8_t* values, uint8_t* scales,
    int threads) {
  using namespace rooflax;
  const auto pack = [&](auto kind, Stored stored) {
    if (groups % decltype(kind)::kGroups != 0) return false;
    Pack<decltype(kind)>({stored, rows, num_rows, groups, values, scales}, threads);
    return true;
  };
  const auto is = [type](const char* name) { return std::strcmp(type, name) == 0; };
  if (is("Q8_0")) return pack(Q8_0{}, {8, 2});
  if (is("Q4_0")) return pack(Q4_0{}, {4, 2});
  if (is("IQ4_NL")) return pack(Q4_0{}, {4, 2});
  if (is("MXFP4")) return pack(Mxfp4{}, {4, 1});
  if (is("Q4_1")) return pack(Q4_1{}, {4, 4});
  if (is("Q5_0")) return pack(Q5_0{}, {5, 2});
  if (is("Q5_1")) return pack(Q5_1{}, {5, 4});
  if (is("Q2_K")) return pack(Q2K{}, {2, 0});
  if (is("Q3_K")) return pack(Q3K{}, {3, 0});
  if (is("Q4_K")) return pack(Q4K{}, {4, 0});
  if (is("Q5_K")) return pack(Q5K{}, {5, 0});
  if (is("Q6_K")) return pack(Q6K{}, {6, 0});
  if (is("IQ4_XS")) return pack(Iq4Xs{}, {4, 0});
  return false;
}
