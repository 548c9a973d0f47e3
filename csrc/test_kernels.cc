// The kernels against plain loops, for every instruction set of this processor, with the work shared
// among threads. Built with sanitizers by `make sanitize`; knows neither XLA nor Python.

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "mask_exchange.h"
#include "parallel.h"
#include "sample.h"

extern "C" const char* rooflax_instruction_set();
extern "C" int rooflax_force_instruction_set(const char* name);
extern "C" bool rooflax_pack_blocks(const char* type, const uint64_t* rows, int64_t num_rows, int64_t groups,
                                    uint8_t* values, uint8_t* scales, int threads);

extern "C" void rooflax_encode_iq4(const float* rows, int64_t groups, uint8_t* codes, float* scales, float* largest,
                                   int threads);
extern "C" void rooflax_encode_int6(const float* rows, int64_t groups, uint8_t* codes, float* scales, float* largest,
                                    int threads);
extern "C" void rooflax_pack_pairs(const uint16_t* w, int64_t inner, int64_t outer, uint16_t* to, int threads);

namespace {

using rooflax::kGroup;
using rooflax::kPanel;
using rooflax::Width;

int failures = 0;

void Check(const std::string& what, float found, float wanted, float tolerance) {
  if (!(std::fabs(found - wanted) <= tolerance)) {
    if (failures < 20) {
      std::printf("%s, %s: %g, wanted %g\n", rooflax_instruction_set(), what.c_str(),
                  static_cast<double>(found), static_cast<double>(wanted));
    }
    ++failures;
  }
}

// Threads that outlive a call, as a pool's tasks may.
struct Pool {
  std::vector<std::thread> threads;
  template <typename Task>
  void operator()(Task task) {
    threads.emplace_back(std::move(task));
  }
  ~Pool() {
    for (auto& thread : threads) thread.join();
  }
};

void Share(int64_t count, const std::function<void(int64_t)>& work) {
  Pool pool;
  rooflax::ParallelFor(count, 3, [&](auto task) { pool(std::move(task)); }, work);
}

std::vector<float> Random(int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (auto& value : values) value = normal(engine);
  return values;
}

uint16_t ToBfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

float FromBfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The same columns part by part: the same bits.
void CheckParts(rooflax::MatmulArgs args, const std::vector<float>& wanted) {
  std::vector<float> y(wanted.size());
  const int64_t count = rooflax::NumParts(args.inner), stride = args.end - args.begin + 3;
  std::vector<float> parts(static_cast<size_t>(count * args.rows * stride));
  args.out.y = y.data();
  args.parts_begin = args.begin;
  args.parts_stride = stride;
  args.parts_size = args.rows * stride;
  for (args.part = count - 1; args.part >= 0; --args.part) {
    args.parts = parts.data() + args.part * args.parts_size;
    rooflax::ChosenKernels().matmul_part(args);
  }
  args.parts = parts.data();
  rooflax::ChosenKernels().add_parts(args);
  for (int64_t m = 0; m < args.rows; ++m) {
    for (int64_t n = args.begin; n < args.end; ++n) {
      const auto at = static_cast<size_t>(m * args.out.outer + n);
      Check("matmul in parts", y[at], wanted[at], 0.0f);
    }
  }
}

// Rows as the terms of bfloat16 that a kernel takes, whole tiles of them and the rest.
std::vector<uint16_t> Terms(const std::vector<float>& x, int64_t rows, int64_t inner,
                            int64_t num_terms, bool table) {
  const auto& kernels = rooflax::ChosenKernels();
  const int64_t size = rooflax::NumTermBlocks(inner) * rooflax::kTermBlock * num_terms;
  std::vector<uint16_t> terms(static_cast<size_t>(rows * size));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t tile = row / rooflax::kTiledRows * rooflax::kTiledRows;
    kernels.split({x.data() + row * inner, terms.data() + tile * size, inner, num_terms, row - tile,
                   std::min(rows - tile, rooflax::kTiledRows), table});
  }
  return terms;
}

// Panels of pairs: every row as alone, float32 and bfloat16 sums.
void TestPairs(int64_t rows, int64_t inner, int64_t outer, int64_t num_terms) {
  auto x = Random(rows * inner, 1);
  for (auto& value : x) value = num_terms == 1 ? FromBfloat16(ToBfloat16(value)) : value;
  const auto bias = Random(outer, 2), w = Random(inner * outer, 3);
  auto residual = Random(rows * outer, 4);
  std::vector<uint16_t> half(w.size()), half_residual(residual.size()), half_y(residual.size());
  std::transform(w.begin(), w.end(), half.begin(), ToBfloat16);
  std::transform(residual.begin(), residual.end(), half_residual.begin(), ToBfloat16);
  std::transform(half_residual.begin(), half_residual.end(), residual.begin(), FromBfloat16);
  const int64_t panels = (outer + rooflax::kPanel - 1) / rooflax::kPanel;
  std::vector<uint16_t> packed(static_cast<size_t>(panels * rooflax::NumTermBlocks(inner) * rooflax::kPairBlockBytes / 2));
  rooflax_pack_pairs(half.data(), inner, outer, packed.data(), 2);
  const auto& kernels = rooflax::ChosenKernels();
  const auto run = [&](int64_t first, int64_t count, void* y, bool halves) {
    const std::vector<float> own(x.begin() + first * inner, x.begin() + (first + count) * inner);
    std::vector<uint16_t> terms;
    if (kernels.tiled || (kernels.split != nullptr && num_terms == 1)) terms = Terms(own, count, inner, num_terms, false);
    const int64_t skipped = first * outer;
    const void* added = halves ? static_cast<const void*>(half_residual.data() + skipped) : residual.data() + skipped;
    rooflax::MatmulArgs args{};
    args.x = own.data();
    args.w = packed.data();
    args.out = {y, bias.data(), added, outer, halves};
    args.rows = count;
    args.inner = inner;
    args.width = rooflax::Width::kBfloat16;
    args.terms = terms.empty() ? nullptr : terms.data();
    args.num_terms = num_terms;
    Share((panels + 2) / 3, [&](int64_t i) {
      rooflax::MatmulArgs part = args;
      part.begin = i * 3;
      part.end = std::min(panels, part.begin + 3);
      kernels.pairs(part);
    });
  };
  std::vector<float> y(residual.size()), alone(static_cast<size_t>(outer));
  run(0, rows, y.data(), false);
  run(0, rows, half_y.data(), true);
  for (int64_t m = 0; m < rows; ++m) {
    run(m, 1, alone.data(), false);
    for (int64_t n = 0; n < outer; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < inner; ++k) sum += x[m * inner + k] * FromBfloat16(half[k * outer + n]);
      const float found = y[m * outer + n];
      Check("pairs", found, sum + bias[n] + residual[m * outer + n], 1e-3f);
      Check("pairs alone", alone[n], found, 0.0f);
      uint16_t nearest;
      kernels.narrow(&found, &nearest, 1, Width::kBfloat16);
      Check("pairs as bfloat16", FromBfloat16(half_y[m * outer + n]), FromBfloat16(nearest), 0.0f);
    }
  }
}

void TestMatmul(int64_t rows, int64_t inner, int64_t outer, bool narrow, int64_t num_terms = 3) {
  auto x = Random(rows * inner, 1);
  if (num_terms == 1) {
    for (auto& value : x) value = FromBfloat16(ToBfloat16(value));
  }
  const auto bias = Random(outer, 2), residual = Random(rows * outer, 4);
  auto w = Random(inner * outer, 3);
  std::vector<uint16_t> half(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    half[i] = ToBfloat16(w[i]);
    if (narrow) w[i] = FromBfloat16(half[i]);
  }
  const void* weights = narrow ? static_cast<const void*>(half.data()) : w.data();
  const auto width = narrow ? rooflax::Width::kBfloat16 : rooflax::Width::kFloat32;
  std::vector<float> y(static_cast<size_t>(rows * outer)), table_y(y), ordered(x);
  const rooflax::Kernels& kernels = rooflax::ChosenKernels();
  for (int64_t m = 0; m < rows && outer * (narrow ? 2 : 4) < kernels.short_row; ++m) {
    kernels.order_inputs(x.data() + m * inner, inner, ordered.data() + m * inner);
  }
  std::vector<uint16_t> table_terms;
  if (narrow && kernels.tiled) table_terms = Terms(x, rows, inner, num_terms, true);
  const int64_t piece = outer < 200 ? 32 : outer;  // a wide matrix as a whole
  Share((outer + piece - 1) / piece, [&](int64_t i) {
    const int64_t end = std::min(outer, (i + 1) * piece);
    const rooflax::MatmulArgs args = {
        ordered.data(), weights, {y.data(), bias.data(), residual.data(), outer}, rows, inner,
        i * piece, end, width, nullptr, 0, 0, 0, 0, nullptr, 0};
    kernels.matmul(args);
    if (rows > rooflax::kFewRows) return;
    CheckParts(args, y);
  });
  // The same numbers read as a table [outer, inner].
  Share((outer + 39) / 40, [&](int64_t i) {
    const int64_t end = std::min(outer, (i + 1) * 40);
    rooflax::ChosenKernels().unembed(
        {x.data(), weights, {table_y.data(), nullptr, nullptr, outer}, rows, inner, i * 40, end,
         width, nullptr, 0, 0, 0, 0, table_terms.data(), num_terms});
  });
  std::vector<float> transposed_y(table_y);
  Share((outer + 47) / 48, [&](int64_t i) {
    kernels.matmul_transposed(
        {x.data(), weights, {transposed_y.data(), bias.data(), nullptr, outer}, rows, inner, i * 48,
         std::min(outer, (i + 1) * 48), width, nullptr, 0, 0, 0, 0, nullptr, 0});
  });
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < outer; ++n) {
      float sum = 0, table_sum = 0;
      for (int64_t k = 0; k < inner; ++k) {
        sum += x[m * inner + k] * w[k * outer + n];
        table_sum += x[m * inner + k] * w[n * inner + k];
      }
      Check("matmul", y[m * outer + n], sum + bias[n] + residual[m * outer + n], 1e-3f);
      Check("unembed", table_y[m * outer + n], table_sum, 1e-3f);
      Check("transposed", transposed_y[m * outer + n], table_sum + bias[n], 1e-3f);
    }
  }
}

using rooflax::Code;

// The value of output n at input k in packed weights, and its scale.
float Value(Code code, const std::vector<uint8_t>& w, int64_t quads, int64_t k, int64_t n) {
  const int64_t panel = n / kPanel, lane = n % kPanel, groups = quads / 8, g = k / kGroup;
  if (code == Code::kInt8 || code == Code::kFp8 || code == Code::kFp8Groups) {
    const uint8_t byte = w[((panel * quads + k / 4) * kPanel + lane) * 4 + k % 4];
    if (code == Code::kInt8) return static_cast<int8_t>(byte);
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                     : std::ldexp(1.0f + static_cast<float>(fraction) / 8, exponent - 7);
    return byte & 128 ? -size : size;
  }
  if (code == Code::kInt8Groups) {
    const int64_t at = ((panel * groups + g) * 8 + k % kGroup / 4) * kPanel + lane;
    return static_cast<int8_t>(w[at * 4 + k % 4]);
  }
  const int64_t at = ((panel * groups + g) * 4 + k % 16 / 4) * kPanel + lane;
  const int nibble = k % kGroup < 16 ? w[at * 4 + k % 4] & 15 : w[at * 4 + k % 4] >> 4;
  if (code == Code::kInt4) return static_cast<float>(nibble - 8);
  if (code == Code::kNf4) return rooflax::kNf4Values[nibble];
  static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return nibble & 8 ? -values[nibble & 7] : values[nibble];
}

constexpr Code kBlockTypes[] = {Code::kQ4_1, Code::kQ5_0, Code::kQ5_1, Code::kQ2K, Code::kQ3K,
                                Code::kQ4K, Code::kQ5K, Code::kQ6K, Code::kIq4Nl, Code::kIq4Xs,
                                Code::kInt6};

// A weight is scaled - minimum.
struct Number {
  float scaled, minimum;
};

// A float16 that is normal.
float FromHalf(uint32_t bits) {
  const float size = std::ldexp(static_cast<float>(1024 + (bits & 1023)), static_cast<int>(bits >> 10 & 31) - 25);
  return bits & 0x8000 ? -size : size;
}

// Scales of a block type, as kernels.h says: random ones.
struct Scales {
  int64_t groups, super_groups = 1;
  std::vector<uint32_t> words;
  std::vector<uint16_t> halves;

  Scales(Code code, int64_t panels, int64_t groups) : groups(groups) {
    const auto kind = rooflax::TraitsOf(code).scales;
    std::mt19937 engine(3);
    const auto half = [&] { return 0x3000 | (engine() & 0x83ff); };  // 1/8 to 1/4, of both signs
    int64_t count = panels * groups, lines = 1;
    if (kind == rooflax::BlockScales::kSuper) {
      for (super_groups = 8; groups % super_groups != 0;) super_groups /= 2;
      lines = 1 + super_groups / 2;
      count = panels * (groups / super_groups) * lines;
    }
    for (int64_t i = 0; i < count * kPanel; ++i) {
      const bool own = i / kPanel % lines != 0;
      words.push_back(static_cast<uint32_t>(own ? engine() : half() | half() << 16));
      halves.push_back(static_cast<uint16_t>(half()));
    }
  }

  const void* Data(Code code) const {
    const bool half = rooflax::TraitsOf(code).scales == rooflax::BlockScales::kHalf;
    return half ? static_cast<const void*>(halves.data()) : words.data();
  }
};

Number BlockNumber(Code code, const std::vector<uint8_t>& w, const Scales& scales, int64_t k, int64_t n) {
  const auto traits = rooflax::TraitsOf(code);
  const int64_t panel = n / kPanel, lane = n % kPanel, g = k / kGroup, quad = k % kGroup / 4;
  const int64_t part = k % kGroup / (kGroup / traits.parts), block = panel * scales.groups + g;
  const auto byte = [&](int64_t line) {
    return int{w[static_cast<size_t>(((block * traits.bits + line) * kPanel + lane) * 4 + k % 4)]};
  };
  const auto two = [&](int64_t line) { return byte(line + quad / 4) >> (2 * (quad % 4)) & 3; };
  int q = traits.bits < 4 ? two(0) : quad < 4 ? byte(quad) & 15 : byte(quad - 4) >> 4;
  if (traits.bits == 3) q |= (byte(2) >> quad & 1) << 2;
  if (traits.bits == 5) q |= (byte(4) >> quad & 1) << 4;
  if (traits.bits == 6) q |= two(4) << 4;
  static const int values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  if (code == Code::kIq4Nl || code == Code::kIq4Xs) q = values[q];
  if (code == Code::kQ5_0) q -= 16;
  if (code == Code::kQ3K) q -= 4;
  if (code == Code::kQ6K || code == Code::kInt6) q -= 32;
  const auto at = static_cast<size_t>(block * kPanel + lane);
  if (traits.scales == rooflax::BlockScales::kHalf) return {FromHalf(scales.halves[at]) * static_cast<float>(q), 0};
  if (traits.scales == rooflax::BlockScales::kPair) {
    return {FromHalf(scales.words[at]) * static_cast<float>(q), -FromHalf(scales.words[at] >> 16)};
  }
  const int64_t supers = scales.groups / scales.super_groups, i = g % scales.super_groups;
  const int64_t first = (panel * supers + g / scales.super_groups) * (1 + scales.super_groups / 2);
  const uint32_t shared = scales.words[static_cast<size_t>(first * kPanel + lane)];
  const uint32_t own = scales.words[static_cast<size_t>((first + 1 + i / 2) * kPanel + lane)] >> (i % 2 * 16);
  const float d = FromHalf(shared) * static_cast<float>(q), e = FromHalf(shared >> 16);
  const auto of_part = static_cast<uint8_t>(part == 0 ? own : own >> 8);
  switch (code) {
    case Code::kQ4K: case Code::kQ5K:
      return {d * static_cast<float>(own & 255), e * static_cast<float>(own >> 8 & 255)};
    case Code::kQ2K: return {d * static_cast<float>(of_part & 15), e * static_cast<float>(of_part >> 4)};
    default: return {d * static_cast<float>(static_cast<int8_t>(of_part)), 0};
  }
}

float PartScale(Code code, int64_t k) { return code == Code::kNvfp4 && k % kGroup >= 16 ? 0.5f : 0.25f; }

// What packed weights stand for, from a panel on and before it.
void TestNumbers(rooflax::PackedArgs args, const std::vector<Number>& wanted, int64_t panels) {
  const int64_t inner = args.inner, outer = args.out.outer;
  std::vector<float> found(static_cast<size_t>(inner * outer));
  args.out.y = found.data();
  Share(2, [&](int64_t i) {
    rooflax::PackedArgs mine = args;
    mine.begin = i * (panels - 1);
    mine.end = panels - 1 + i;
    rooflax::ChosenKernels().numbers(mine);
  });
  for (int64_t k = 0; k < inner; ++k) {
    for (int64_t n = 0; n < outer; ++n) {
      const Number number = wanted[static_cast<size_t>(n * inner + k)];
      const float size = std::fabs(number.scaled) + std::fabs(number.minimum);
      Check("a number", found[k * outer + n], number.scaled - number.minimum, 1e-6f * size);
    }
  }
}

// Rows are those of a test of fewer, whose outputs are the same bits. Of two planes the rows' numbers are those of
// 16 bits that rounding gives, wherever the kernels keep them.
std::vector<float> TestPacked(Code code, int64_t rows, int64_t inner, int64_t outer, bool bytes,
                              int64_t planes = 1) {
  const bool grouped = code != Code::kInt8 && code != Code::kFp8;
  const int64_t panels = (outer + kPanel - 1) / kPanel, quads = (inner + 3) / 4, stride = quads * 4;
  const int64_t groups = grouped ? inner / kGroup : 1;
  const auto block = rooflax::TraitsOf(code);
  const int64_t bits = block.bits != 0 ? block.bits : rooflax::IsNibbles(code) ? 4 : 8;
  const int64_t per_panel = stride * kPanel * bits / 8;
  const auto x = Random(rows * inner, 1);
  std::mt19937 engine(2);
  std::vector<uint8_t> w(static_cast<size_t>(panels * per_panel));
  const unsigned values = code == Code::kFp8 || code == Code::kFp8Groups ? 127 : 256;  // no NaN
  for (auto& byte : w) byte = static_cast<uint8_t>(engine() % values);
  const auto count = static_cast<size_t>(panels * groups * kPanel);
  std::vector<float> scales(count * 2, 0.25f);  // of halves of a group as well, the second's other
  for (size_t i = 0; code == Code::kNvfp4 && i < scales.size(); ++i) scales[i] = i / kPanel % 2 == 0 ? 0.25f : 0.5f;
  const std::vector<uint16_t> halves(count, 0x3400);
  const std::vector<uint8_t> exponents(count, 125);
  std::vector<int32_t> sums(count, 0);
  if (code == Code::kInt8) {
    for (int64_t n = 0; n < panels * kPanel; ++n) {
      for (int64_t k = 0; k < stride; ++k) {
        sums[static_cast<size_t>(n)] += static_cast<int32_t>(Value(code, w, quads, k, n));
      }
    }
  }
  const Scales of_blocks(code, panels, groups);
  std::vector<Number> numbers;  // [outer, inner]
  for (int64_t n = 0; n < outer; ++n) {
    for (int64_t k = 0; k < inner; ++k) {
      numbers.push_back(block.bits != 0 ? BlockNumber(code, w, of_blocks, k, n)
                                        : Number{Value(code, w, quads, k, n) * PartScale(code, k), 0});
    }
  }
  std::vector<uint8_t> q(static_cast<size_t>(rows * rooflax::RowBytes(stride) * planes));
  std::vector<float> x_scale(static_cast<size_t>(rows * groups)), y(static_cast<size_t>(rows * outer));
  std::vector<int32_t> x_start(x_scale.size() * static_cast<size_t>(block.parts));
  const auto& kernels = rooflax::ChosenKernels();
  const int64_t most = rooflax::MostRows(kernels, code, rows * planes);
  const bool tiled = code == Code::kInt8 && rooflax::IsTiled(kernels, code, rows);
  int64_t tile = 0, tile_rows = rooflax::TileRows(rows, most);  // that the row is of
  std::vector<uint8_t> quantized;  // rows of kInt8, one after the other
  std::vector<int64_t> group_at;  // of each row: where its first group lies, and how far apart they are
  for (int64_t row = 0; row < rows && bytes; ++row) {
    if (row == tile + tile_rows) {
      tile = row;
      tile_rows = rooflax::TileRows(rows - tile, most);
    }
    if (grouped) {
      const int64_t first = tile * groups + row - tile;
      group_at.insert(group_at.end(), {first, tile_rows});
      kernels.quantize_groups({x.data() + row * inner, reinterpret_cast<int8_t*>(&q[first * kGroup * planes]),
                               &x_scale[first], &x_start[tile * groups * block.parts + row - tile], inner,
                               tile_rows, rooflax::StartTimes(code), block.parts, planes});
    } else {
      std::vector<uint8_t> own(static_cast<size_t>(rooflax::RowBytes(stride)));
      kernels.quantize_row({x.data() + row * inner, own.data(), &x_scale[row], inner, stride});
      quantized.insert(quantized.end(), own.begin(), own.begin() + stride);
      if (!tiled) std::copy(own.begin(), own.begin() + stride, &q[row * stride]);
      for (int64_t k = 0; tiled && k < stride; k += rooflax::kRowBlock) {
        const int64_t at = tile * rooflax::RowBytes(stride) + k * tile_rows + (row - tile) * rooflax::kRowBlock;
        std::copy(own.begin() + k, own.begin() + k + rooflax::kRowBlock, &q[at]);
      }
    }
  }
  rooflax::PackedArgs args{};
  args.code = code;
  args.w = w.data();
  args.w_scale = code == Code::kMxfp4 ? static_cast<const void*>(exponents.data())
                 : block.bits != 0 ? of_blocks.Data(code)
                 : grouped && !rooflax::HasFloatScales(code) ? halves.data() : static_cast<const void*>(scales.data());
  args.super_groups = of_blocks.super_groups;
  args.w_sum = sums.data();
  args.x = bytes ? static_cast<const void*>(q.data()) : x.data();
  args.x_scale = x_scale.data();
  args.x_start = x_start.data();
  args.out = {y.data(), nullptr, nullptr, outer};
  args.rows = rows;
  args.stride = stride;
  args.inner = inner;
  args.planes = planes;
  Share(2, [&](int64_t i) {  // all but the last, and the last
    rooflax::PackedArgs mine = args;
    mine.begin = i * (panels - 1);
    mine.end = panels - 1 + i;
    bytes ? kernels.bytes(mine) : kernels.packed(mine);
  });
  if (!bytes) TestNumbers(args, numbers, panels);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < outer; ++n) {
      double wanted = 0, size = 0;
      int64_t exact = 0;
      for (int64_t k = 0; k < inner; ++k) {
        double input = x[m * inner + k];
        if (bytes && grouped) {
          const int64_t group = group_at[2 * m] + k / kGroup * group_at[2 * m + 1];
          const auto byte = static_cast<int8_t>(q[group * kGroup + k % kGroup]);
          input = (planes == 2 ? std::nearbyint(input / x_scale[group]) : static_cast<double>(byte)) * x_scale[group];
        } else if (bytes) {
          const auto byte = static_cast<uint8_t>(quantized[m * stride + k] - kernels.row_offset);
          input = static_cast<double>(static_cast<int8_t>(byte)) * x_scale[m];
        }
        const Number number = numbers[static_cast<size_t>(n * inner + k)];
        wanted += input * number.scaled - input * number.minimum;
        size += std::fabs(input) * (std::fabs(number.scaled) + std::fabs(number.minimum));
        if (bytes && code == Code::kInt8) exact += std::lround(input / x_scale[m] * number.scaled * 4);
      }
      if (bytes && code == Code::kInt8) {  // whole numbers, scaled once
        Check("a sum of bytes", y[m * outer + n], static_cast<float>(exact) * (0.25f * x_scale[m]), 0.0f);
      }
      Check("packed " + std::to_string(static_cast<int>(code)), y[m * outer + n],
            static_cast<float>(wanted), static_cast<float>(1e-5 * size + 1e-5));
    }
  }
  for (int64_t fewer = 1; fewer <= 2 && rows > 2; ++fewer) {
    const auto some = TestPacked(code, fewer, inner, outer, bytes, planes);
    for (size_t i = 0; i < some.size(); ++i) Check("packed rows alone", some[i], y[i], 0.0f);
  }
  return y;
}

void TestBefore(rooflax::Before kind, bool gated, int64_t inner) {
  const auto x = Random(inner * 2, 5), weight = Random(inner, 6), bias = Random(inner, 7);
  std::vector<float> out(static_cast<size_t>(inner));
  rooflax::BeforeArgs args{kind, gated, weight.data(), bias.data(), 1e-5f, 1.702f, 7.0f, inner};
  rooflax::ChosenKernels().before(args, x.data(), out.data());
  for (float value : out) Check("before", std::isfinite(value) ? 1.0f : 0.0f, 1.0f, 0.0f);
}

// Queries one after the other at the end of `count` keys, the first of which a window hides; in bfloat16, if
// `halves`, as are their shares.
void TestAttend(int64_t head_dim, int64_t count, int64_t queries, rooflax::Width width, bool halves = false) {
  constexpr int64_t kBlock = 4, kBlocks = 12;
  auto q = Random(head_dim * queries, 1);
  std::vector<uint16_t> half_queries;
  for (size_t i = 0; halves && i < q.size(); ++i) {
    half_queries.push_back(ToBfloat16(q[i]));
    q[i] = FromBfloat16(half_queries[i]);
  }
  auto k = Random(kBlocks * kBlock * head_dim, 2), v = Random(kBlocks * kBlock * head_dim, 3);
  auto scales = Random(kBlocks * kBlock, 4);
  for (auto& s : scales) s *= 0.05f;
  std::vector<uint16_t> half[2];
  std::vector<int8_t> bytes[2];
  for (int which = 0; which < 2; ++which) {
    auto& wide = which == 0 ? k : v;
    for (size_t i = 0; i < wide.size(); ++i) {
      half[which].push_back(ToBfloat16(wide[i]));
      const auto size = std::lround(wide[i] * 20);
      bytes[which].push_back(static_cast<int8_t>(size));
      if (width == rooflax::Width::kFp8) {  // both kinds of exponents, and no NaN
        const int code = static_cast<int>(std::min(std::abs(size), 0x3fl)) | (size < 0 ? 0x80 : 0);
        bytes[which].back() = static_cast<int8_t>(code);
      }
      if (width == rooflax::Width::kBfloat16) wide[i] = FromBfloat16(half[which][i]);
      if (width == rooflax::Width::kFloat16) {  // eleven bits of a number that is not subnormal
        wide[i] = std::round(wide[i] * 256) / 256;
        rooflax::ChosenKernels().narrow(&wide[i], &half[which][i], 1, width);
      }
      if (width == rooflax::Width::kFp8) {
        const int size = bytes[which][i] & 0x7f, sign = bytes[which][i] < 0 ? -1 : 1;
        const double value = size < 8 ? std::ldexp(size, -9)
                                      : std::ldexp(8 + (size & 7), (size >> 3) - 10);
        wide[i] = static_cast<float>(sign * value) * scales[i / static_cast<size_t>(head_dim)];
      }
      if (width == rooflax::Width::kInt8) {
        wide[i] = static_cast<float>(bytes[which][i]) * scales[i / static_cast<size_t>(head_dim)];
      }
    }
  }
  const std::vector<int32_t> table = {7, 3, 11, 5, 1, 9, 0, 2, 4, 6, 8, 10};
  const float sink = 0.5f, scale = 0.3f;
  const auto bias = Random(count + queries, 11);
  const int64_t first = count > 3 || count == 0 ? 2 : 0;  // also where all see nothing
  const int64_t blocks = (first + count + rooflax::kSlotBlock - 1) / rooflax::kSlotBlock;
  const int64_t span = halves ? blocks * rooflax::kSlotBlock : count;
  std::vector<float> scores(static_cast<size_t>(span * queries)), keys(static_cast<size_t>(head_dim * rooflax::kKeysAtOnce));
  std::vector<float> out(static_cast<size_t>(head_dim * queries));
  std::vector<rooflax::Query> all;
  for (int64_t n = 0; n < queries; ++n) {
    const int64_t last = first + std::max<int64_t>(0, count - (queries - 1 - n));
    const float* own = queries == 3 ? bias.data() + n : nullptr;
    all.push_back({q.data() + n * head_dim, out.data() + n * head_dim, first, last, &sink, own});
  }
  const auto pool = [&](const std::vector<float>& wide, int which) -> const void* {
    if (width == rooflax::Width::kBfloat16 || width == rooflax::Width::kFloat16) {
      return half[which].data();
    }
    if (width == rooflax::Width::kInt8 || width == rooflax::Width::kFp8) return bytes[which].data();
    return wide.data();
  };
  rooflax::AttendArgs args{};
  args.queries = all.data();
  args.count = queries;
  args.halves = half_queries.data();
  args.k = pool(k, 0);
  args.v = pool(v, 1);
  args.k_scale = args.v_scale = scales.data();
  args.table = table.data();
  args.scores = scores.data();
  args.keys = keys.data();
  args.span = span;
  args.block_stride = kBlock * head_dim;
  args.block_size = kBlock;
  args.head_dim = head_dim;
  args.scale = scale;
  args.cap = queries == 3 ? 1.5f : 0.0f;
  args.width = width;
  const rooflax::Kernels& kernels = rooflax::ChosenKernels();
  (halves ? kernels.attend_halves : kernels.attend)(args);
  float largest = 0;
  for (float value : v) largest = std::max(largest, std::fabs(value));
  const float tolerance = halves ? 0x1p-9f * largest : 1e-4f;  // of a share, to nearest
  for (const auto& query : all) {
    std::vector<double> wanted(static_cast<size_t>(head_dim), 0.0);
    double total = std::exp(static_cast<double>(sink));
    for (int64_t i = query.first; i < query.last; ++i) {
      const int64_t at = (table[i / kBlock] * kBlock + i % kBlock) * head_dim;
      double score = 0;
      for (int64_t d = 0; d < head_dim; ++d) score += static_cast<double>(query.q[d]) * k[at + d];
      const double gain = query.bias == nullptr ? 0 : static_cast<double>(query.bias[i - first]);
      score *= static_cast<double>(scale);
      if (args.cap > 0) score = std::tanh(score / static_cast<double>(args.cap)) * static_cast<double>(args.cap);
      const double share = std::exp(score + gain);
      total += share;
      for (int64_t d = 0; d < head_dim; ++d) wanted[d] += share * v[at + d];
    }
    for (int64_t d = 0; d < head_dim; ++d) {
      Check("attend", query.out[d], static_cast<float>(wanted[d] / total), tolerance);
    }
  }
  const std::vector<float> together = out;
  for (int64_t n = 0; n < queries && !halves; ++n) {
    args.queries = all.data() + n;
    args.count = 1;
    kernels.attend(args);
  }
  for (size_t i = 0; i < out.size(); ++i) Check("attend alone", out[i], together[i], 0.0f);
}

// What is above a value, gathered in pieces of `room`; the last lanes have no neighbours to read.
// A head's queries over its sequence, tile by tile, and its gradients; beside plain loops in double.
void TestWhole(int64_t head_dim, int64_t count, bool apart) {
  using rooflax::kWholeBlock, rooflax::Sight;
  const int64_t heads = 2, step = (count + kPanel - 1) / kPanel * kPanel, tiles = (count + kWholeBlock - 1) / kWholeBlock;
  const auto size = static_cast<size_t>(count * heads * head_dim);
  const auto q = Random(count * heads * head_dim, 1), d_out = Random(count * heads * head_dim, 2);
  const auto k = Random(count * head_dim, 3), v = Random(count * head_dim, 4);
  std::vector<float> k_transposed(static_cast<size_t>(step * head_dim)), v_transposed(k_transposed.size());
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t d = 0; d < head_dim; ++d) {
      k_transposed[static_cast<size_t>(d * step + j)] = k[static_cast<size_t>(j * head_dim + d)];
      v_transposed[static_cast<size_t>(d * step + j)] = v[static_cast<size_t>(j * head_dim + d)];
    }
  }
  // Documents of 50 tokens with windows of 20 and a sink, or one of all; the first query sees nothing.
  const auto n = static_cast<size_t>(count);
  std::vector<int32_t> low(n, INT32_MIN), high(n), segments(n), positions(static_cast<size_t>(step), INT32_MAX),
      key_segments(static_cast<size_t>(step));
  for (int32_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    segments[at] = key_segments[at] = apart ? i / 50 : 0;
    positions[at] = high[at] = apart ? i % 50 : i;
    if (apart) low[at] = positions[at] - 20;
  }
  high[0] = -1;
  const float sink = 0.4f, scale = 0.3f;
  const float* const own_sink = apart ? &sink : nullptr;
  std::vector<float> out(size), dq(size), log_sums(n * heads), dk(k.size() * heads), dv(k.size() * heads);
  Share(heads, [&](int64_t head) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = tile * kWholeBlock, at = (first * heads + head) * head_dim, of = head * count * head_dim;
      std::vector<Sight> sight(static_cast<size_t>(tiles), Sight::kSome);
      for (int64_t other = 0; !apart && other < tiles; ++other) {
        if (other != tile) sight[static_cast<size_t>(other)] = other < tile ? Sight::kAll : Sight::kNothing;
      }
      rooflax::WholeArgs a{};
      a.head_dim = head_dim;
      a.queries = std::min(kWholeBlock, count - first);
      a.query_step = heads * head_dim;
      a.q = q.data() + at;
      a.low = low.data() + first, a.high = high.data() + first, a.segments = segments.data() + first;
      a.keys = count, a.key_step = step;
      a.k = k.data(), a.v = v.data(), a.k_transposed = k_transposed.data(), a.v_transposed = v_transposed.data();
      a.positions = positions.data(), a.key_segments = key_segments.data();
      a.sight = sight.data(), a.sink = own_sink, a.scale = scale;
      a.out = out.data() + at, a.log_sums = log_sums.data() + head * count + first;
      rooflax::ChosenKernels().whole(a);
      a.begin = 0, a.end = count;
      a.d_out = d_out.data() + at, a.dq = dq.data() + at, a.dk = dk.data() + of, a.dv = dv.data() + of;
      rooflax::ChosenKernels().whole_backward(a);
    }
  });
  std::vector<double> wanted_dk(dk.size()), wanted_dv(dk.size());
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>((i * heads + head) * head_dim), ni = static_cast<size_t>(i);
      const auto dot = [&](const float* a, const float* b) {
        double sum = 0;
        for (int64_t d = 0; d < head_dim; ++d) sum += static_cast<double>(a[d]) * static_cast<double>(b[d]);
        return sum;
      };
      std::vector<double> shares(n), o(static_cast<size_t>(head_dim)), grad(o.size());
      double total = apart ? std::exp(static_cast<double>(sink)) : 0, delta = 0;
      for (size_t j = 0; j < n; ++j) {
        if (positions[j] > high[ni] || positions[j] <= low[ni] || key_segments[j] != segments[ni]) continue;
        shares[j] = std::exp(dot(&q[at], &k[j * o.size()]) * static_cast<double>(scale));
        total += shares[j];
      }
      for (size_t j = 0; j < n && total > 0; ++j) {
        shares[j] /= total;
        for (size_t d = 0; d < o.size(); ++d) o[d] += shares[j] * static_cast<double>(v[j * o.size() + d]);
      }
      for (size_t d = 0; d < o.size(); ++d) delta += o[d] * static_cast<double>(d_out[at + d]);
      for (size_t j = 0; j < n; ++j) {
        const double ds = shares[j] * (dot(&d_out[at], &v[j * o.size()]) - delta) * static_cast<double>(scale);
        const size_t key = (static_cast<size_t>(head) * n + j) * o.size();
        for (size_t d = 0; d < o.size(); ++d) {
          grad[d] += ds * static_cast<double>(k[j * o.size() + d]);
          wanted_dk[key + d] += ds * static_cast<double>(q[at + d]);
          wanted_dv[key + d] += shares[j] * static_cast<double>(d_out[at + d]);
        }
      }
      for (size_t d = 0; d < o.size(); ++d) {
        Check("whole attention", out[at + d], static_cast<float>(o[d]), 1e-5f);
        Check("gradient of q", dq[at + d], static_cast<float>(grad[d]), 2e-5f);
      }
    }
  }
  for (size_t i = 0; i < dk.size(); ++i) {
    Check("gradient of k", dk[i], static_cast<float>(wanted_dk[i]), 1e-4f);
    Check("gradient of v", dv[i], static_cast<float>(wanted_dv[i]), 1e-4f);
  }
}

// Rows of an adapter against plain loops, and each as it is alone, to the bit.
void TestAdapter(int64_t rows, int64_t inner, int64_t width, int64_t outputs, bool halves) {
  const int64_t rank = width < 20 ? width - 3 : 11, panels = (outputs + kPanel - 1) / kPanel, first = 3;
  const int64_t outer = first + outputs + 2, begin = inner / 3;
  const auto x = Random(rows * inner, 21);
  auto a = Random(inner * width, 22), b = Random(panels * rank * kPanel, 23);
  std::vector<uint16_t> half_a, half_b;
  for (auto [wide, half] : {std::pair{&a, &half_a}, {&b, &half_b}}) {
    for (float& value : *wide) {
      if (halves) value = FromBfloat16(half->emplace_back(ToBfloat16(value)));
    }
  }
  const void* const a_data = halves ? static_cast<const void*>(half_a.data()) : a.data();
  const void* const b_data = halves ? static_cast<const void*>(half_b.data()) : b.data();
  const auto run = [&](int64_t row, int64_t count, float* sums, float* y) {
    std::vector<const float*> from;
    std::vector<void*> to;
    for (int64_t i = 0; i < count; ++i) from.push_back(x.data() + (row + i) * inner);
    for (int64_t i = 0; i < count; ++i) to.push_back(y + i * outer);
    rooflax::ChosenKernels().shrink({from.data(), a_data, sums, count, width, begin, inner, halves});
    Share(panels, [&](int64_t panel) {
      rooflax::ChosenKernels().expand({sums + 1, b_data, to.data(), count, width, rank, first, outputs, panel,
                                       panel + 1, halves, false});
    });
  };
  std::vector<float> sums(static_cast<size_t>(rows * width)), y(static_cast<size_t>(rows * outer), 1.0f);
  run(0, rows, sums.data(), y.data());
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<float> alone(static_cast<size_t>(width)), own(static_cast<size_t>(outer), 1.0f);
    run(row, 1, alone.data(), own.data());
    for (int64_t n = 0; n < width; ++n) {
      double sum = 0;
      for (int64_t k = begin; k < inner; ++k) {
        sum += static_cast<double>(x[static_cast<size_t>(row * inner + k)]) * a[static_cast<size_t>(k * width + n)];
      }
      const float found = sums[static_cast<size_t>(row * width + n)];
      Check("shrink", found, static_cast<float>(sum), 1e-3f);
      Check("shrink alone", found, alone[static_cast<size_t>(n)], 0.0f);
    }
    for (int64_t n = 0; n < outer; ++n) {
      const int64_t at = n - first;
      double sum = 1;
      for (int64_t r = 0; r < rank && at >= 0 && at < outputs; ++r) {
        sum += static_cast<double>(alone[static_cast<size_t>(1 + r)]) *
               b[static_cast<size_t>((at / kPanel * rank + r) * kPanel + at % kPanel)];
      }
      const float found = y[static_cast<size_t>(row * outer + n)];
      Check("expand", found, static_cast<float>(sum), 1e-3f * std::max(1.0f, std::fabs(static_cast<float>(sum))));
      Check("expand alone", found, own[static_cast<size_t>(n)], 0.0f);
    }
  }
}

void TestAbove(int64_t count, int64_t room) {
  const auto x = Random(count, 8);
  std::vector<int32_t> found(static_cast<size_t>(room)), all;
  for (int64_t at = 0; at < count;) {
    const int64_t n = rooflax::ChosenKernels().above(x.data(), &at, count, 0.5f, found.data(), room);
    all.insert(all.end(), found.begin(), found.begin() + n);
  }
  size_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!(x[static_cast<size_t>(i)] > 0.5f)) continue;
    Check("above", next < all.size() ? static_cast<float>(all[next]) : -1, static_cast<float>(i), 0);
    ++next;
  }
  Check("above, number", static_cast<float>(all.size()), static_cast<float>(next), 0);
}

// The first word of threefry2x32-20, as its authors write it.
uint32_t Threefry(const uint32_t key[2], uint32_t x0, uint32_t x1) {
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x0 += keys[0];
  x1 += keys[1];
  for (uint32_t block = 0; block < 5; ++block) {
    for (const int by : rotations[block % 2]) {
      x0 += x1;
      x1 = (x1 << by | x1 >> (32 - by)) ^ x0;
    }
    x0 += keys[(block + 1) % 3];
    x1 += keys[(block + 2) % 3] + block + 1;
  }
  return x0;
}

// Draws against plain loops: of logits `spread` apart, with and without some that do not survive.
void TestDraw(int64_t count, float spread) {
  auto x = Random(count, 10);
  for (auto& value : x) value *= spread;
  const auto first = static_cast<int64_t>(std::max_element(x.begin(), x.end()) - x.begin());
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const int64_t last = seed % 2 == 0 ? count : static_cast<int64_t>(seed) % count;
    const float least = seed % 2 == 0 ? -INFINITY : x[static_cast<size_t>(last)];
    const uint32_t key[2] = {seed, 4};
    std::vector<double> value(x.size(), -INFINITY);
    for (size_t i = 0; i < x.size(); ++i) {
      const auto id = static_cast<uint32_t>(i);
      const double u = ((Threefry(key, 5, id) >> 9) + 0.5) * 0x1p-23;
      if (x[i] > least || (x[i] == least && static_cast<int64_t>(i) <= last)) {
        value[i] = static_cast<double>(x[i]) - std::log(-std::log(u));
      }
    }
    const int64_t found =
        rooflax::ChosenKernels().draw({{seed, 4}, 5, x.data(), count, least, last, first});
    const double best = *std::max_element(value.begin(), value.end());
    Check("draw", static_cast<float>(value[static_cast<size_t>(found)] - best), 0, 1e-5f);
  }
}

void TestSums(int64_t count) {
  const auto x = Random(count, 11);
  std::vector<float> weights(x.size());
  const auto& kernels = rooflax::ChosenKernels();
  const double found = kernels.exp_each(x.data(), count, 3, weights.data());
  double total = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double wanted = std::exp(static_cast<double>(x[i]) - 3);
    Check("exponential", weights[i], static_cast<float>(wanted), 1e-6f * static_cast<float>(wanted));
    total += wanted;
  }
  Check("sum of exponentials", static_cast<float>(found / total), 1, 1e-6f);
  Check("sum of exponentials in float32", kernels.exp_total(x.data(), count, 3) / static_cast<float>(total), 1, 1e-5f);
  const float levels[rooflax::kLevels] = {-5, -0.5f, x[0], 9};
  double sums[rooflax::kLevels], numbers[rooflax::kLevels];
  kernels.sums_above(x.data(), weights.data(), count, levels, sums);
  kernels.sums_above(x.data(), nullptr, count, levels, numbers);
  for (int64_t l = 0; l < rooflax::kLevels; ++l) {
    double sum = 0, number = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      if (!(x[i] > levels[l])) continue;
      sum += static_cast<double>(weights[i]);
      ++number;
    }
    Check("sum above", static_cast<float>(sums[l]), static_cast<float>(sum), 1e-5f * static_cast<float>(sum));
    Check("number above", static_cast<float>(numbers[l]), static_cast<float>(number), 0);
  }
}

// One row of the sampler, with everything that a sequence can want at once; -1 is nobody's id.
void TestSample(int64_t vocab, float temperature, bool filters) {
  auto logits = Random(vocab, 9);
  rooflax::SamplingRow w{};
  w.temperature = temperature;
  w.top_p = filters ? 0.9f : 1.0f;
  w.top_k = filters ? (vocab > 2000 ? 2000 : 300) : 0;
  w.min_p = filters ? 0.01f : 0;
  w.repetition_penalty = 1.5f;
  w.presence_penalty = w.frequency_penalty = 0.5f;
  w.num_logprobs = 2;
  w.min_position = 9;
  w.scores_adjusted = temperature > 0 ? 0 : 1;
  w.is_masked = 1;
  std::fill(w.allowed, std::end(w.allowed), -1);
  std::fill(w.stop, std::end(w.stop), -1);
  const auto last = static_cast<int32_t>(vocab - 1);
  w.bias_ids[0] = 2;
  w.bias_values[0] = 50;
  w.stop[0] = 2;  // too early for it
  w.bias_ids[1] = last;
  w.bias_values[1] = 40;
  w.stop[1] = last + 1;
  const std::vector<char> in_prompt(static_cast<size_t>(vocab), 1);
  const std::vector<int32_t> generated(static_cast<size_t>(vocab), 1), mask(
      static_cast<size_t>((vocab + 31) / 32), ~0);
  const int32_t pending[3] = {last, -1, last};
  std::vector<float> scratch(static_cast<size_t>(2 * vocab)), values(3);
  std::vector<int32_t> ids(3);
  const auto found = rooflax::SampleRow(
      {w, logits.data(), vocab, 4, reinterpret_cast<const bool*>(in_prompt.data()), generated.data(),
       mask.data(), pending, 3, scratch.data(), scratch.data() + vocab},
      3, ids.data(), values.data());
  Check("sample", static_cast<float>(found.token), static_cast<float>(last), 0);
  Check("sample, finite", found.is_finite && found.is_allowed ? 1 : 0, 1, 0);
  for (size_t i = 1; i < 3; ++i) Check("sample, order", values[i - 1] >= values[i] ? 1 : 0, 1, 0);
}

// A sampler and a host take turns, and a dispatch that ends early frees who waits.
void TestMaskExchange() {
  rooflax::MaskExchange exchange(2, 3, 1);
  for (int dispatch = 0; dispatch < 20; ++dispatch) {
    constexpr int64_t kSteps = 50;
    const int64_t last = dispatch % 2 == 0 ? kSteps : kSteps / 2;  // the sampler's
    exchange.Begin();
    std::thread host([&] {
      for (int64_t step = 1; step < kSteps && exchange.AwaitTokens(step - 1); ++step) {
        exchange.masks[2] = 10 * exchange.tokens[1];
        exchange.PublishMasks(step);
      }
    });
    for (int64_t step = 0; step < last; ++step) {
      if (step > 0) {
        Check("masks that come", exchange.AwaitMasks(step), 1, 0);
        Check("masks of the tokens", static_cast<float>(exchange.masks[2]), 10 * static_cast<float>(step - 1), 0);
      }
      const int32_t tokens[] = {7, static_cast<int32_t>(step)};
      exchange.PublishTokens(step, tokens, 2);
    }
    exchange.End();
    host.join();
    Check("masks after the end", exchange.AwaitMasks(1), 0, 0);
  }
}

// Rows of blocks by three threads, as by one.
void TestPackBlocks() {
  std::mt19937 engine(5);
  for (const char* type : {"Q8_0", "Q4_0", "MXFP4", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
                           "IQ4_NL", "IQ4_XS"}) {
    constexpr int64_t kRows = 75, kGroups = 16, kMost = 34 * kGroups, kOut = 80 * kGroups * 32;
    std::vector<uint8_t> blocks(kRows * kMost), one(kOut, 1), three(kOut, 1), scales(kOut, 1), others(kOut, 1);
    for (auto& byte : blocks) byte = static_cast<uint8_t>(engine());
    std::vector<uint64_t> rows;
    for (int64_t i = 0; i < kRows; ++i) rows.push_back(reinterpret_cast<uint64_t>(&blocks[i * kMost]));
    const bool known = rooflax_pack_blocks(type, rows.data(), kRows, kGroups, one.data(), scales.data(), 1) &&
                       rooflax_pack_blocks(type, rows.data(), kRows, kGroups, three.data(), others.data(), 3);
    Check(type, known && one == three && scales == others, 1, 0);
  }
}

using Encoder = void(const float*, int64_t, uint8_t*, float*, float*, int);

// Groups by three threads as by one, whatever their numbers; a group of the values of its codes keeps them.
void TestEncoder(const char* name, Encoder& encode, const std::vector<int>& values) {
  constexpr int64_t kGroups = 75, kSize = 32;
  const auto count = static_cast<int64_t>(values.size());
  std::mt19937 engine(6);
  std::normal_distribution<float> normal;
  std::vector<float> rows(kGroups * kSize);
  for (auto& x : rows) x = normal(engine);
  for (int64_t i = 0; i < kSize; ++i) rows[kSize + i] = 0.25f * static_cast<float>(values[i % count]);
  const float strange[] = {NAN, INFINITY, -INFINITY, 3e38f, 1e-45f, 0.0f, 70000.0f * 127.0f};
  for (int64_t i = 0; i < 7; ++i) {
    std::fill_n(&rows[(2 + i) * kSize], kSize, 0.0f);
    rows[(2 + i) * kSize + 5] = strange[i];
  }
  std::vector<uint8_t> codes(rows.size(), 99), others(rows.size(), 99);
  std::vector<float> scales(kGroups, -1), own(kGroups, -1), largest(kGroups, -1), most(kGroups, -1);
  encode(rows.data(), kGroups, codes.data(), scales.data(), largest.data(), 1);
  encode(rows.data(), kGroups, others.data(), own.data(), most.data(), 3);
  const auto same = [](const auto& a, const auto& b) { return std::memcmp(a.data(), b.data(), 4 * a.size()) == 0; };
  Check(name, codes == others && same(scales, own) && same(largest, most), 1, 0);
  for (uint8_t code : codes) Check("a code", code < count, 1, 0);
  for (int64_t i = 0; i < kSize; ++i) {
    Check("a value of a code", scales[1] * static_cast<float>(values[codes[kSize + i]]), rows[kSize + i], 1e-6f);
  }
  for (int64_t i = 0; i < 3; ++i) Check("a fault", std::isnan(largest[2 + i]), 1, 0);
  Check("the largest", largest[1], 0.25f * std::fabs(static_cast<float>(values[0])), 0);
}

void TestEncoders() {
  TestEncoder("iq4 by threads", rooflax_encode_iq4,
              {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});
  std::vector<int> whole(64);
  std::iota(whole.begin(), whole.end(), -32);
  TestEncoder("int6 by threads", rooflax_encode_int6, whole);
}

}  // namespace

// Threads divide one row, few and many; kernels have tiles of other numbers.
#if defined(__SANITIZE_THREAD__)
constexpr int64_t kRows[] = {1, 2, 3, 7, 16, 30};
#else
constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 30};
#endif

// Tests the instruction sets that are named, or all that this processor has.
int main(int argc, char** argv) {
  std::vector<const char*> names(argv + 1, argv + argc);
  const bool all = names.empty();
  if (all) names = {"generic", "avx2", "avx2-vnni", "avx512", "avx512-far", "avx512-bf16", "amx", "neon-dotprod", "neon-i8mm"};
  TestMaskExchange();
  TestPackBlocks();
  TestEncoders();
  for (const char* name : names) {
    if (!rooflax_force_instruction_set(name)) {
      if (all) continue;
      std::printf("%s: not on this processor\n", name);
      return 1;
    }
    for (int64_t rows : kRows) {
      for (bool narrow : {false, true}) {
        TestMatmul(rows, 37, 75, narrow);
        TestMatmul(rows, 151, 75, narrow);
        if (narrow) TestMatmul(rows, 151, 75, true, 1);
        if (narrow) TestPairs(rows, 37, 75, 1);
        if (narrow) TestPairs(rows, 1061, 19, 3);
      }
      for (int64_t inner : {0, 3, 132}) {  // parts too short for stretches
        if (rows == 2 || rows == 30) TestMatmul(rows, inner, 43, inner == 132);
      }
      if (rows == 3 || rows == 16) TestMatmul(rows, 1060, 331, rows == 3);  // blocks of a part
      if (rows == 7) TestMatmul(rows, 1060, 83, true);  // and of a table
      if (rows == 16) TestMatmul(109, 1060, 43, false);  // and more rows than are near
      if (rows == 30) TestPairs(520, 37, 19, 3);  // and of rows
      if (rows == 30) TestPairs(33, 37, 290, 1);  // and of panels
      if (rows == 2 || rows == 30) TestMatmul(rows, 37, 2100, false);  // rows too long to order
      if (rows == 1 || rows == 3) TestMatmul(rows, 37, 331, rows == 3);
      const int64_t packed = rows <= 2 ? 203 : 75;  // few rows take panels far from each other
      for (bool bytes : {false, true}) {
        TestPacked(Code::kInt8, rows, 67, packed, bytes);
        TestPacked(Code::kInt8Groups, rows, 96, packed, bytes);
        TestPacked(Code::kInt4, rows, 96, packed, bytes);
        TestPacked(Code::kMxfp4, rows, 96, packed, bytes);
        for (Code code : kBlockTypes) TestPacked(code, rows, 128, packed, bytes);
      }
      for (Code code : {Code::kInt8Groups, Code::kInt4, Code::kMxfp4}) TestPacked(code, rows, 96, packed, true, 2);
      for (Code code : kBlockTypes) TestPacked(code, rows, 128, packed, true, 2);
      TestPacked(Code::kFp8, rows, 67, 75, false);
      for (Code code : {Code::kFp8Groups, Code::kNf4, Code::kNvfp4}) {
        TestPacked(code, rows, rows == 30 ? 544 : 96, packed, false);
      }
      if (rows == 7) {  // tiles of 16, the last not whole
        TestPacked(Code::kInt8, 45, 203, 75, true);
        for (Code code : {Code::kInt8Groups, Code::kInt4, Code::kMxfp4}) {
          TestPacked(code, 45, 192, 75, true);
          TestPacked(code, 45, 192, 75, true, 2);
        }
        for (Code code : kBlockTypes) {
          for (int64_t inner : {192, 512}) {
            TestPacked(code, 45, inner, 75, true);
            TestPacked(code, 45, inner, 75, true, 2);
          }
        }
      }
      if (rows != 30) continue;
      for (Code code : {Code::kInt8, Code::kFp8}) TestPacked(code, rows, 531, 75, false);
      for (Code code : {Code::kInt8Groups, Code::kInt4, Code::kMxfp4}) {
        TestPacked(code, rows, 544, 330, false);
      }
      for (Code code : kBlockTypes) TestPacked(code, rows, 576, 330, false);
    }
    for (int kind = 1; kind <= 7; ++kind) {
      for (bool gated : {false, true}) TestBefore(static_cast<rooflax::Before>(kind), gated, 37);
    }
    for (int64_t head_dim : {8, 20, 64}) {
      for (int64_t count : {0, 1, 5, 22}) {
        for (int64_t queries = 1; queries <= std::min<int64_t>(count + 1, rooflax::kQueries); ++queries) {
          for (auto width : {Width::kFloat32, Width::kBfloat16, Width::kFloat16, Width::kInt8,
                             Width::kFp8}) {
            TestAttend(head_dim, count, queries, width);
          }
        }
      }
    }
    for (int64_t head_dim : {32, 96}) {
      for (int64_t count : {0, 1, 22, 45}) {
        for (int64_t queries : {1, 3, 8, 16, 17, 32}) {
          if (queries > count + 1 || rooflax::ChosenKernels().attend_halves == nullptr) continue;
          TestAttend(head_dim, count, queries, Width::kBfloat16, true);
        }
      }
    }
    for (int64_t head_dim : {16, 48, 64}) {
      for (int64_t count : {1, 23, 150}) {
        for (bool apart : {false, true}) TestWhole(head_dim, count, apart);
      }
    }
    for (int64_t rows = 1; rows <= 9; ++rows) {
      for (int64_t width : {16, 32, 48, 80}) {
        for (bool halves : {false, true}) TestAdapter(rows, 67, width, width == 32 ? 600 : 83, halves);
      }
    }
    for (int64_t count : {1, 40, 1000}) {
      for (int64_t room : {1, 30, 2000}) TestAbove(count, room);
      TestSums(count);
      for (float spread : {0.0f, 1.0f, 9.0f}) TestDraw(count, spread);
      if (count < 40) continue;
      for (float temperature : {0.0f, 0.7f}) {
        for (bool filters : {false, true}) TestSample(count, temperature, filters);
        TestSample(3000, temperature, true);
      }
    }
    std::printf("%s: %s\n", name, failures == 0 ? "passed" : "FAILED");
  }
  return failures == 0 ? 0 : 1;
}
