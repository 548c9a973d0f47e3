// The kernels against plain loops, for every instruction set of this processor, with the work shared
// among threads. Built with sanitizers by `make sanitize`; knows neither XLA nor Python.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "parallel.h"

extern "C" const char* rooflax_instruction_set();
extern "C" int rooflax_force_instruction_set(const char* name);

namespace {

using rooflax::kGroup;
using rooflax::kPanel;

int failures = 0;

void Check(const std::string& what, float found, float wanted, float tolerance) {
  if (!(std::fabs(found - wanted) <= tolerance)) {
    std::printf("%s, %s: %g, wanted %g\n", rooflax_instruction_set(), what.c_str(),
                static_cast<double>(found), static_cast<double>(wanted));
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

void TestMatmul(int64_t rows, int64_t inner, int64_t outer, bool narrow) {
  const auto x = Random(rows * inner, 1), bias = Random(outer, 2);
  auto w = Random(inner * outer, 3);
  std::vector<uint16_t> half(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    half[i] = ToBfloat16(w[i]);
    if (narrow) w[i] = FromBfloat16(half[i]);
  }
  const void* weights = narrow ? static_cast<const void*>(half.data()) : w.data();
  const auto width = narrow ? rooflax::Width::kBfloat16 : rooflax::Width::kFloat32;
  std::vector<float> y(static_cast<size_t>(rows * outer)), table_y(y);
  Share((outer + 31) / 32, [&](int64_t i) {
    const int64_t end = std::min(outer, (i + 1) * 32);
    rooflax::ChosenKernels().matmul(
        {x.data(), weights, bias.data(), y.data(), rows, inner, outer, i * 32, end, width});
  });
  // The same numbers read as a table [outer, inner].
  Share((outer + 7) / 8, [&](int64_t i) {
    const int64_t end = std::min(outer, (i + 1) * 8);
    rooflax::ChosenKernels().unembed(
        {x.data(), weights, table_y.data(), rows, inner, outer, i * 8, end, width});
  });
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < outer; ++n) {
      float sum = 0, table_sum = 0;
      for (int64_t k = 0; k < inner; ++k) {
        sum += x[m * inner + k] * w[k * outer + n];
        table_sum += x[m * inner + k] * w[n * inner + k];
      }
      Check("matmul", y[m * outer + n], sum + bias[n], 1e-3f);
      Check("unembed", table_y[m * outer + n], table_sum, 1e-3f);
    }
  }
}

void TestInt8(int64_t rows, int64_t inner, int64_t outer) {
  const int64_t panels = (outer + kPanel - 1) / kPanel, stride = (inner + 3) / 4 * 4;
  const auto x = Random(rows * inner, 1);
  std::mt19937 engine(2);
  std::vector<int8_t> w(static_cast<size_t>(panels * stride * kPanel), 0);
  std::vector<float> scale(static_cast<size_t>(panels * kPanel), 0.01f);
  std::vector<int32_t> sum(scale.size(), 0);
  const auto at = [&](int64_t k, int64_t n) -> int8_t& {
    return w[((n / kPanel * (stride / 4) + k / 4) * kPanel + n % kPanel) * 4 + k % 4];
  };
  for (int64_t n = 0; n < outer; ++n) {
    for (int64_t k = 0; k < inner; ++k) {
      at(k, n) = static_cast<int8_t>(static_cast<int>(engine() % 255) - 127);
      sum[n] += at(k, n);
    }
  }
  std::vector<uint8_t> q(static_cast<size_t>(rows * stride));
  std::vector<float> x_scale(static_cast<size_t>(rows)), y(static_cast<size_t>(rows * outer));
  const auto& kernels = rooflax::ChosenKernels();
  const rooflax::QuantizeRowsArgs quantize{x.data(), q.data(), x_scale.data(), inner, stride};
  for (int64_t row = 0; row < rows; ++row) kernels.quantize_row(quantize, row);
  Share(panels, [&](int64_t i) {
    kernels.int8({q.data(), x_scale.data(), w.data(), scale.data(), sum.data(), nullptr, y.data(),
                  rows, stride, outer, i, i + 1});
  });
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < outer; ++n) {
      int64_t exact = 0;
      for (int64_t k = 0; k < inner; ++k) exact += (q[m * stride + k] - 128) * at(k, n);
      Check("int8", y[m * outer + n], static_cast<float>(exact) * 0.01f * x_scale[m], 1e-2f);
    }
  }
}

void TestInt4(int64_t rows, int64_t groups, int64_t outer) {
  const int64_t panels = (outer + kPanel - 1) / kPanel, inner = groups * kGroup;
  const auto x = Random(rows * inner, 1);
  std::mt19937 engine(2);
  std::vector<uint8_t> w(static_cast<size_t>(panels * groups * 256));
  for (auto& byte : w) byte = static_cast<uint8_t>(engine());
  std::vector<uint16_t> scale(static_cast<size_t>(panels * groups * kPanel), 0x2e66);  // 0.1
  std::vector<int8_t> q(static_cast<size_t>(rows * inner));
  std::vector<float> x_scale(static_cast<size_t>(rows * groups));
  std::vector<int32_t> x_sum(x_scale.size());
  std::vector<float> y(static_cast<size_t>(rows * outer));
  const auto& kernels = rooflax::ChosenKernels();
  const rooflax::QuantizeGroupsArgs quantize{x.data(), q.data(), x_scale.data(), x_sum.data(),
                                             inner};
  for (int64_t row = 0; row < rows; ++row) kernels.quantize_groups(quantize, row);
  Share(panels, [&](int64_t i) {
    kernels.int4({q.data(), x_scale.data(), x_sum.data(), w.data(), scale.data(), nullptr,
                  y.data(), rows, groups, outer, i, i + 1});
  });
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < outer; ++n) {
      float wanted = 0;
      for (int64_t g = 0; g < groups; ++g) {
        int32_t exact = 0;
        for (int64_t k = 0; k < kGroup; ++k) {
          const int64_t block = ((n / kPanel * groups + g) * 4 + k % 16 / 4) * 64;
          const uint8_t both = w[block + n % kPanel * 4 + k % 4];
          const int32_t value = (k < 16 ? both & 15 : both >> 4) - 8;
          exact += value * q[m * inner + g * kGroup + k];
        }
        wanted += static_cast<float>(exact) * 0.0999756f * x_scale[m * groups + g];
      }
      Check("int4", y[m * outer + n], wanted, 1e-3f);
    }
  }
}

void TestAttend(int64_t head_dim, int64_t count, bool narrow) {
  constexpr int64_t kBlock = 4, kBlocks = 12;
  const auto q = Random(head_dim, 1);
  auto k = Random(kBlocks * kBlock * head_dim, 2), v = Random(kBlocks * kBlock * head_dim, 3);
  std::vector<uint16_t> k_half(k.size()), v_half(v.size());
  for (size_t i = 0; i < k.size(); ++i) {
    k_half[i] = ToBfloat16(k[i]);
    v_half[i] = ToBfloat16(v[i]);
    if (narrow) k[i] = FromBfloat16(k_half[i]), v[i] = FromBfloat16(v_half[i]);
  }
  const std::vector<int32_t> table = {7, 3, 11, 5, 1, 9};
  const float sink = 0.5f, scale = 0.3f;
  const int64_t first = count > 3 ? 2 : 0;
  std::vector<float> scores(static_cast<size_t>(count)), out(static_cast<size_t>(head_dim));
  const void* keys = narrow ? static_cast<const void*>(k_half.data()) : k.data();
  const void* values = narrow ? static_cast<const void*>(v_half.data()) : v.data();
  rooflax::ChosenKernels().attend(
      {q.data(), keys, values, table.data(), scores.data(), out.data(), kBlock * head_dim, kBlock,
       head_dim, first, first + count, scale, &sink,
       narrow ? rooflax::Width::kBfloat16 : rooflax::Width::kFloat32});
  std::vector<double> wanted(static_cast<size_t>(head_dim), 0.0);
  double total = std::exp(static_cast<double>(sink));
  for (int64_t i = first; i < first + count; ++i) {
    const int64_t at = (table[i / kBlock] * kBlock + i % kBlock) * head_dim;
    double score = 0;
    for (int64_t d = 0; d < head_dim; ++d) score += static_cast<double>(q[d]) * k[at + d];
    const double share = std::exp(score * static_cast<double>(scale));
    total += share;
    for (int64_t d = 0; d < head_dim; ++d) wanted[d] += share * v[at + d];
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    Check("attend", out[d], static_cast<float>(wanted[d] / total), 1e-4f);
  }
}

}  // namespace

int main() {
  for (const char* name : {"generic", "avx2", "avx512"}) {
    if (!rooflax_force_instruction_set(name)) continue;
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 30}) {
      for (bool narrow : {false, true}) TestMatmul(rows, 37, 75, narrow);
      TestInt8(rows, 67, 75);
      TestInt4(rows, 3, 75);
    }
    for (int64_t head_dim : {20, 64}) {
      for (int64_t count : {0, 1, 5, 22}) {
        for (bool narrow : {false, true}) TestAttend(head_dim, count, narrow);
      }
    }
    std::printf("%s: %s\n", name, failures == 0 ? "passed" : "FAILED");
  }
  return failures == 0 ? 0 : 1;
}
