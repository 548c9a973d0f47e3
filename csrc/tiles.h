// The tile registers of AMX: eight of 16 rows by 64 bytes, and the instructions that the kernels use.
//
// With ROOFLAX_TILES_IN_MEMORY they are arrays, so that every machine and every sanitizer can run the
// kernels; the operations follow Intel's description (Software Developer's Manual, TDPBF16PS and others).
#ifndef ROOFLAX_TILES_H_
#define ROOFLAX_TILES_H_

#include <cstdint>

#if defined(ROOFLAX_TILES_IN_MEMORY)
#include <cmath>
#include <cstdlib>
#include <cstring>
#endif

namespace rooflax {

constexpr int64_t kTileHeight = 16, kTileBytes = 64;  // the most of a tile

// Rows and bytes of a row of each tile, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void Set(int tile, int64_t height, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

#if !defined(ROOFLAX_TILES_IN_MEMORY)

inline void ConfigureTiles(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
}
inline void ReleaseTiles() { asm volatile("tilerelease" : : : "memory"); }

template <int kTile>
inline void ZeroTile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
inline void LoadTile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
// Of what passes by once: it takes no place of what stays.
template <int kTile>
inline void LoadPassingTile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void StoreTile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

// kSum += kA @ kB, of int8 by int8, uint8 by int8, and bfloat16.
template <int kSum, int kA, int kB>
inline void AddSignedBytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}
template <int kSum, int kA, int kB>
inline void AddUnsignedBytes() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}
template <int kSum, int kA, int kB>
inline void AddBfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

#else

struct TilesInMemory {
  TileShapes shapes;
  bool ready = false;
  uint8_t data[8][kTileHeight][kTileBytes] = {};
};
inline TilesInMemory& Tiles() {
  static thread_local TilesInMemory tiles;
  return tiles;
}

inline void ConfigureTiles(const TileShapes& shapes) {
  Tiles() = TilesInMemory{};
  for (int tile = 0; tile < 8; ++tile) {
    if (shapes.rows[tile] > kTileHeight || shapes.row_bytes[tile] > kTileBytes) std::abort();
  }
  Tiles().shapes = shapes;
  Tiles().ready = true;
}
inline void ReleaseTiles() { Tiles().ready = false; }

// What a tile instruction reads of a tile that has a shape; others fault.
template <int kTile>
inline uint8_t (&TileData())[kTileHeight][kTileBytes] {
  const TilesInMemory& tiles = Tiles();
  if (!tiles.ready || tiles.shapes.rows[kTile] == 0) std::abort();
  return Tiles().data[kTile];
}
template <int kTile>
inline void ZeroTile() {
  std::memset(TileData<kTile>(), 0, sizeof(Tiles().data[kTile]));
}
template <int kTile>
inline void LoadTile(const void* from, int64_t stride) {
  ZeroTile<kTile>();
  const auto bytes = static_cast<size_t>(Tiles().shapes.row_bytes[kTile]);
  for (int64_t row = 0; row < Tiles().shapes.rows[kTile]; ++row) {
    std::memcpy(TileData<kTile>()[row], static_cast<const char*>(from) + row * stride, bytes);
  }
}
template <int kTile>
inline void LoadPassingTile(const void* from, int64_t stride) {
  LoadTile<kTile>(from, stride);
}
template <int kTile>
inline void StoreTile(void* to, int64_t stride) {
  const auto bytes = static_cast<size_t>(Tiles().shapes.row_bytes[kTile]);
  for (int64_t row = 0; row < Tiles().shapes.rows[kTile]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, TileData<kTile>()[row], bytes);
  }
}

// Shapes of a product have to fit together.
template <int kSum, int kA, int kB>
inline void CheckShapes() {
  const TileShapes& shapes = Tiles().shapes;
  const bool fits = shapes.rows[kSum] == shapes.rows[kA] &&
                    shapes.row_bytes[kSum] == shapes.row_bytes[kB] &&
                    shapes.row_bytes[kA] == 4 * shapes.rows[kB];
  if (!fits) std::abort();
}

template <typename A, int kSum, int kA, int kB>
inline void AddBytes() {
  CheckShapes<kSum, kA, kB>();
  const auto &a = TileData<kA>(), &b = TileData<kB>();
  auto& sum = TileData<kSum>();
  for (int64_t m = 0; m < Tiles().shapes.rows[kA]; ++m) {
    for (int64_t n = 0; n < Tiles().shapes.row_bytes[kSum] / 4; ++n) {
      int32_t total;
      std::memcpy(&total, &sum[m][n * 4], sizeof(total));
      for (int64_t k = 0; k < Tiles().shapes.row_bytes[kA]; ++k) {
        total += static_cast<A>(a[m][k]) * static_cast<int8_t>(b[k / 4][n * 4 + k % 4]);
      }
      std::memcpy(&sum[m][n * 4], &total, sizeof(total));
    }
  }
}
template <int kSum, int kA, int kB>
inline void AddSignedBytes() {
  AddBytes<int8_t, kSum, kA, kB>();
}
template <int kSum, int kA, int kB>
inline void AddUnsignedBytes() {
  AddBytes<uint8_t, kSum, kA, kB>();
}

// Denormal numbers are zero, as operands and as results.
inline float Flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

template <int kSum, int kA, int kB>
inline void AddBfloat16() {
  CheckShapes<kSum, kA, kB>();
  const auto &a = TileData<kA>(), &b = TileData<kB>();
  auto& sum = TileData<kSum>();
  const auto value = [](const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, sizeof(half));
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return Flushed(wide);
  };
  for (int64_t m = 0; m < Tiles().shapes.rows[kA]; ++m) {
    for (int64_t n = 0; n < Tiles().shapes.row_bytes[kSum] / 4; ++n) {
      float halves[2] = {0.0f, 0.0f}, total;
      for (int64_t k = 0; k < Tiles().shapes.row_bytes[kA] / 4; ++k) {
        for (int64_t i = 0; i < 2; ++i) {
          const float product_of[] = {value(&a[m][k * 4 + i * 2]), value(&b[k][n * 4 + i * 2])};
          halves[i] = Flushed(std::fma(product_of[0], product_of[1], halves[i]));
        }
      }
      std::memcpy(&total, &sum[m][n * 4], sizeof(total));
      total = Flushed(Flushed(total) + Flushed(halves[0] + halves[1]));
      std::memcpy(&sum[m][n * 4], &total, sizeof(total));
    }
  }
}

#endif

// Tiles that are configured as long as this lives.
class ConfiguredTiles {
 public:
  explicit ConfiguredTiles(const TileShapes& shapes) { ConfigureTiles(shapes); }
  ~ConfiguredTiles() { ReleaseTiles(); }
  ConfiguredTiles(const ConfiguredTiles&) = delete;
  ConfiguredTiles& operator=(const ConfiguredTiles&) = delete;
};

}  // namespace rooflax

#endif  // ROOFLAX_TILES_H_
