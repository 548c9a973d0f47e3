// The kernels, one table of them per instruction set. Shapes and layouts are said here once.
//
// An output is always summed in the order of k, whatever the number of rows and however the work is
// split, so a row's result does not depend on the rows beside it.
#ifndef ROOFLAX_KERNELS_H_
#define ROOFLAX_KERNELS_H_

#include <cstdint>

namespace rooflax {

// Outputs whose weights lie side by side in a packed matrix, and inputs that share a scale.
constexpr int64_t kPanel = 16;
constexpr int64_t kGroup = 32;

enum class Width { kFloat32, kBfloat16 };

// y[m, n] = sum over k of x[m, k] * w[k, n] + bias[n], for n in [begin, end).
struct MatmulArgs {
  const float* x;  // [rows, inner]
  const void* w;   // [inner, outer]
  const float* bias;  // [outer] or null
  float* y;  // [rows, outer]
  int64_t rows, inner, outer, begin, end;
  Width width;
};

// y[m, v] = sum over k of x[m, k] * table[v, k], for v in [begin, end).
struct UnembedArgs {
  const float* x;  // [rows, inner]
  const void* table;  // [outer, inner]
  float* y;  // [rows, outer]
  int64_t rows, inner, outer, begin, end;
  Width width;
};

// Rows of float32 as int8, one scale per row: q = round(x / scale), scale = max |x| / 127.
struct QuantizeRowsArgs {
  const float* x;  // [rows, inner]
  uint8_t* q;  // [rows, stride]: q + 128; padding is 128
  float* scale;  // [rows]
  int64_t inner, stride;
};

// Rows of float32 as int8, one scale per group of 32.
struct QuantizeGroupsArgs {
  const float* x;  // [rows, inner]
  int8_t* q;  // [rows, inner]
  float* scale;  // [rows, inner / 32]
  int32_t* sum;  // [rows, inner / 32]: of q
  int64_t inner;
};

// Packed int8 weights with a scale per output, for panels [begin, end).
//   y[m, n] = x_scale[m] * w_scale[n] * (sum over k of xq[m, k] * wq[k, n]) + bias[n]
struct Int8Args {
  const uint8_t* x;  // [rows, stride]
  const float* x_scale;  // [rows]
  const int8_t* w;  // [panels, stride / 4, 16, 4]
  const float* w_scale;  // [panels * 16]
  const int32_t* w_sum;  // [panels * 16]: of wq over k
  const float* bias;  // [outer] or null
  float* y;  // [rows, outer]
  int64_t rows, stride, outer, begin, end;
};

// Packed int4 weights with a scale per output and group of 32, for panels [begin, end).
//   y[m, n] = sum over g of x_scale[m, g] * w_scale[g, n] * (sum in g of xq * (wq - 8)) + bias[n]
struct Int4Args {
  const int8_t* x;  // [rows, groups * 32]
  const float* x_scale;  // [rows, groups]
  const int32_t* x_sum;  // [rows, groups]
  const uint8_t* w;  // [panels, groups, 4, 16, 4]: k = 4 s + j below, 16 + 4 s + j above
  const uint16_t* w_scale;  // float16 [panels, groups, 16]
  const float* bias;  // [outer] or null
  float* y;  // [rows, outer]
  int64_t rows, groups, outer, begin, end;
};

// One query head of one row over its blocks:
//   p = softmax over visible s of (scale * q . k[s], and the sink);  out = sum of p[s] * v[s]
struct AttendArgs {
  const float* q;  // [head_dim]
  const void* k;  // pool [blocks, kv_heads, block_size, head_dim], at this K/V head
  const void* v;
  const int32_t* table;  // block numbers
  float* scores;  // [last - first], scratch
  float* out;  // [head_dim]
  int64_t block_stride, block_size, head_dim;  // block_stride in elements
  int64_t first, last;  // visible slots of the table, [first, last)
  float scale;
  const float* sink;  // or null
  Width width;
};

// Index of the largest of `count` values: the first of equals, the first NaN if there is one.
using ArgmaxKernel = int64_t (*)(const float* x, int64_t count);

struct Kernels {
  const char* name;
  void (*matmul)(const MatmulArgs&);
  void (*unembed)(const UnembedArgs&);
  void (*quantize_row)(const QuantizeRowsArgs&, int64_t row);
  void (*quantize_groups)(const QuantizeGroupsArgs&, int64_t row);
  void (*int8)(const Int8Args&);
  void (*int4)(const Int4Args&);
  void (*attend)(const AttendArgs&);
  ArgmaxKernel argmax;
};

namespace generic { extern const Kernels kKernels; }
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }

// The best of this processor, or the one that was forced.
const Kernels& ChosenKernels();

}  // namespace rooflax

#endif  // ROOFLAX_KERNELS_H_
