// The custom calls' handlers, entered through call frames as XLA's, with shapes, tables, ids and lengths
// drawn at random, valid or not. Built with the address and undefined behaviour sanitizers by `make fuzz`.
//
// Every array lies in memory of exactly its size. What this file's own rules say of a draw, the handler
// has to say too: it rejects, or its output is a plain loop's. Inputs never change, and neither does
// an output that belongs to padding.
//   fuzz [draws per handler and instruction set [instruction set]]

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "ffi_common.h"
#include "sample.h"

extern "C" {
const char* rooflax_instruction_set();
int rooflax_force_instruction_set(const char* name);
XLA_FFI_Handler rooflax_matmul, rooflax_attention, rooflax_rows, rooflax_argmax, rooflax_sample,
    rooflax_cache_write, rooflax_norm, rooflax_numbers, rooflax_delta_rule, rooflax_causal_conv,
    rooflax_whole_attention, rooflax_whole_attention_gradients, rooflax_adapters, rooflax_matmul_transposed;
int32_t rooflax_masks_new(int64_t rows, int64_t slots, int64_t words);
int32_t* rooflax_masks_words(int32_t number);
void rooflax_masks_begin(int32_t number);
void rooflax_masks_end(int32_t number);
void rooflax_masks_delete(int32_t number);
void rooflax_masks_publish(int32_t number, int64_t step);
bool rooflax_pack_blocks(const char* type, const uint64_t* rows, int64_t num_rows, int64_t groups, uint8_t* values,
                         uint8_t* scales, int threads);
void rooflax_encode_iq4(const float* rows, int64_t groups, uint8_t* codes, float* scales, float* largest, int threads);
void rooflax_encode_int6(const float* rows, int64_t groups, uint8_t* codes, float* scales, float* largest, int threads);
}

struct XLA_FFI_Error {
  std::string message;
};

namespace {

using rooflax::kNoSlot;
using Type = XLA_FFI_DataType;
constexpr Type kF32 = XLA_FFI_DataType_F32, kS32 = XLA_FFI_DataType_S32, kF16 = XLA_FFI_DataType_F16,
               kBf16 = XLA_FFI_DataType_BF16, kS8 = XLA_FFI_DataType_S8, kU8 = XLA_FFI_DataType_U8, kU32 = XLA_FFI_DataType_U32,
               kFp8 = XLA_FFI_DataType_F8E4M3FN, kPred = XLA_FFI_DataType_PRED;

// ---- Drawing ----

struct Random {
  uint64_t state;

  uint64_t Next() {  // splitmix64
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int64_t Below(int64_t n) { return static_cast<int64_t>(Next() % static_cast<uint64_t>(n)); }
  int64_t In(int64_t low, int64_t high) { return low + Below(high - low + 1); }
  bool OneIn(int64_t n) { return Below(n) == 0; }
  // Multiples of 1/8, which every width holds.
  float Float() { return static_cast<float>(In(-15, 15)) / 8; }
  template <typename T>
  T Of(std::initializer_list<T> values) {
    return values.begin()[Below(static_cast<int64_t>(values.size()))];
  }
  // What no index of `limit` things is, or just is.
  int32_t Strange(int64_t limit) {
    const auto n = static_cast<int32_t>(limit);
    return Of<int32_t>({-1, n, n + 1, n - 1, -n - 1, INT_MIN, INT_MAX, INT_MAX - 1,
                        static_cast<int32_t>(kNoSlot), static_cast<int32_t>(kNoSlot) - 1,
                        static_cast<int32_t>(Next())});
  }
};

Random draw{0};
const char* handler_name = "";
int64_t draw_number = 0, rejected = 0, computed = 0;

[[noreturn]] void Fail(const std::string& what) {
  std::printf("%s, %s, draw %lld: %s\n", handler_name, rooflax_instruction_set(),
              static_cast<long long>(draw_number), what.c_str());
  std::exit(1);
}

void Expect(bool condition, const char* what) {
  if (!condition) Fail(what);
}

// ---- Arrays and call frames ----

int64_t SizeOf(Type type) {
  return static_cast<int64_t>(xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(type)));
}

constexpr unsigned char kUntouched = 0xAB;

struct Array {
  Type type;
  std::vector<int64_t> dims;
  std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};

  Array(Type type, std::vector<int64_t> dims) : type(type), dims(std::move(dims)) {}

  int64_t Count() const {
    int64_t count = 1;
    for (int64_t dim : dims) count *= dim;
    return count;
  }
  size_t Bytes() const { return static_cast<size_t>(Count() * SizeOf(type)); }
  void Allocate() { memory.reset(static_cast<char*>(std::malloc(Bytes()))); }
  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(memory.get());
  }
  template <typename T>
  T& At(int64_t i) const {
    return As<T>()[i];
  }
  // Members [first, first + count) of an array of `members`, or all of it.
  Array Part(int64_t members, int64_t first, std::vector<int64_t> part_dims) const {
    Array part(type, std::move(part_dims));
    part.Allocate();
    const size_t each = members == 0 ? 0 : Bytes() / static_cast<size_t>(members);
    std::memcpy(part.As<char>(), As<char>() + static_cast<size_t>(first) * each, part.Bytes());
    return part;
  }
  // Numbers of moderate size; of int32 small ones, and strange ones among them.
  void Fill() {
    Allocate();
    for (int64_t i = 0; i < Count(); ++i) {
      const uint64_t bits = draw.Next();
      switch (type) {
        case kF32: At<float>(i) = draw.Float(); break;
        case kS32: At<int32_t>(i) = draw.OneIn(4) ? draw.Strange(2) : static_cast<int32_t>(bits % 3); break;
        case kF16: At<uint16_t>(i) = static_cast<uint16_t>(bits & 0xBFFF); break;  // below 2
        case kU32: At<uint32_t>(i) = static_cast<uint32_t>(bits & 0xBFFFBFFF); break;  // two of these
        case kBf16: {
          const float value = draw.Float();
          std::memcpy(&At<uint16_t>(i), reinterpret_cast<const char*>(&value) + 2, 2);
          break;
        }
        case kFp8: At<uint8_t>(i) = static_cast<uint8_t>(bits & 0xBF); break;  // below 2
        case kPred: At<uint8_t>(i) = static_cast<uint8_t>(bits & 1); break;
        default: std::memset(As<char>() + i * SizeOf(type), static_cast<int>(bits & 0xFF),
                             static_cast<size_t>(SizeOf(type)));
      }
    }
  }
};

float Decode(const Array& array, int64_t i) {
  switch (array.type) {
    case kF32: return array.At<float>(i);
    case kS8: return array.At<int8_t>(i);
    case kBf16: {
      const uint32_t bits = static_cast<uint32_t>(array.At<uint16_t>(i)) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      return value;
    }
    default: {
      const bool half = array.type == kF16;
      const int bits = half ? array.At<uint16_t>(i) : array.At<uint8_t>(i);
      const int fraction = half ? 10 : 3, bias = half ? 15 : 7, sign = half ? 15 : 7;
      const int exponent = (bits & ((1 << sign) - 1)) >> fraction, low = bits & ((1 << fraction) - 1);
      const float size = exponent == 0
          ? std::ldexp(static_cast<float>(low), 1 - bias - fraction)
          : std::ldexp(static_cast<float>(low + (1 << fraction)), exponent - bias - fraction);
      return bits >> sign ? -size : size;
    }
  }
}

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}
void MessageOf(XLA_FFI_Error_GetMessage_Args* args) { args->message = args->error->message.c_str(); }
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  args->task(args->data);
  return nullptr;
}
XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 2;
  return nullptr;
}

const XLA_FFI_Api& Api() {
  static XLA_FFI_Api api = [] {
    XLA_FFI_Api made{};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                        XLA_FFI_API_MINOR};
    made.XLA_FFI_Error_Create = CreateError;
    made.XLA_FFI_Error_GetMessage = MessageOf;
    made.XLA_FFI_Error_Destroy = DestroyError;
    made.XLA_FFI_ThreadPool_Schedule = Schedule;
    made.XLA_FFI_ThreadPool_NumThreads = NumThreads;
    return made;
  }();
  return api;
}

XLA_FFI_CallFrame NewFrame() {
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &Api();
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

struct Attribute {
  const char* name;
  bool is_float;
  int64_t whole;
  float real;
};
Attribute Whole(const char* name, int64_t value) { return {name, false, value, 0}; }
Attribute Real(const char* name, float value) { return {name, true, 0, value}; }

struct Call {
  XLA_FFI_Handler* handler;
  std::vector<Array> args, rets;
  std::vector<Attribute> attributes;  // by name
  bool in_place = false;  // the result is the first argument's memory

  // Sometimes an array that does not fit the others. True if there is one: its contents are random.
  bool Mutate() {
    if (!draw.OneIn(8)) return false;
    const int64_t at = draw.Below(static_cast<int64_t>(args.size() + rets.size()));
    const auto number = static_cast<size_t>(at);
    Array& array = number < args.size() ? args[number] : rets[number - args.size()];
    const auto rank = static_cast<int64_t>(array.dims.size());
    switch (draw.Below(5)) {
      case 0: array.dims.push_back(draw.In(0, 2)); break;
      case 1: array.type = draw.Of({kF32, kS32, kF16, kBf16, kS8, kU8, kU32, kFp8, kPred}); break;
      case 2: array.dims.resize(static_cast<size_t>(draw.Below(rank + 1))); break;
      default: {
        if (rank == 0) break;
        int64_t& dim = array.dims[static_cast<size_t>(draw.Below(rank))];
        dim = draw.OneIn(3) ? 0 : std::max<int64_t>(0, dim + draw.Of<int64_t>({-1, 1}));
      }
    }
    in_place = false;
    return true;
  }

  // What the handler says: "" where it computed.
  std::string Run() {
    static std::vector<char> before;  // the inputs, one behind the other
    static std::vector<XLA_FFI_Buffer> buffers;
    before.clear();
    buffers.clear();
    std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_AttrType> attr_types(attributes.size(), XLA_FFI_AttrType_SCALAR);
    std::vector<XLA_FFI_ByteSpan> names;
    std::vector<XLA_FFI_Scalar> scalars;
    std::vector<void*> all, attrs;
    std::vector<XLA_FFI_ByteSpan*> name_pointers;
    for (Array& ret : rets) {
      ret.Allocate();
      std::memset(ret.As<char>(), kUntouched, ret.Bytes());
    }
    for (const Array& arg : args) before.insert(before.end(), arg.As<char>(), arg.As<char>() + arg.Bytes());
    const auto add = [&](Array& array, void* data) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.type, data,
                         static_cast<int64_t>(array.dims.size()), array.dims.data()});
    };
    for (Array& arg : args) add(arg, arg.As<void>());
    for (Array& ret : rets) add(ret, in_place ? args[0].As<void>() : ret.As<void>());
    for (XLA_FFI_Buffer& buffer : buffers) all.push_back(&buffer);
    for (Attribute& a : attributes) {
      names.push_back({a.name, std::strlen(a.name)});
      scalars.push_back({a.is_float ? kF32 : XLA_FFI_DataType_S64,
                         a.is_float ? static_cast<void*>(&a.real) : &a.whole});
    }
    for (XLA_FFI_ByteSpan& name : names) name_pointers.push_back(&name);
    for (XLA_FFI_Scalar& scalar : scalars) attrs.push_back(&scalar);
    XLA_FFI_CallFrame frame = NewFrame();
    frame.args.size = static_cast<int64_t>(args.size());
    frame.args.types = arg_types.data();
    frame.args.args = all.data();
    frame.rets.size = static_cast<int64_t>(rets.size());
    frame.rets.types = ret_types.data();
    frame.rets.rets = all.data() + args.size();
    frame.attrs.size = static_cast<int64_t>(attributes.size());
    frame.attrs.types = attr_types.data();
    frame.attrs.names = name_pointers.data();
    frame.attrs.attrs = attrs.data();
    const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
    if (in_place) {
      std::memcpy(rets[0].As<char>(), args[0].As<char>(), rets[0].Bytes());
    }
    auto unchanged = before.begin();
    for (const Array& arg : args) {
      const bool is_result = in_place && error == nullptr && &arg == args.data();
      Expect(is_result || std::equal(arg.As<char>(), arg.As<char>() + arg.Bytes(), unchanged),
             "an input was written");
      unchanged += static_cast<std::ptrdiff_t>(arg.Bytes());
    }
    Expect(error == nullptr || !error->message.empty(), "an error without a sentence");
    return error == nullptr ? "" : error->message;
  }

  // Runs it; true if it computed, which it has to exactly where the draw is valid.
  bool RunExpecting(bool valid) {
    const std::string why = Run();
    ++(why.empty() ? computed : rejected);
    if (why.empty() && !valid) Fail("computed what is not valid");
    if (!why.empty() && valid) Fail("rejected what is valid: " + why);
    Expect(why.empty() || why.rfind("rooflax ", 0) == 0, "a sentence that does not say whose it is");
    return why.empty();
  }

  // What no rule here says anything about: only the sanitizers look. Sums are no indices: they are zero.
  void RunMutated(size_t sums = SIZE_MAX) {
    for (Array& arg : args) arg.Fill();
    if (sums < args.size()) std::memset(args[sums].As<char>(), 0, args[sums].Bytes());
    ++(Run().empty() ? computed : rejected);
  }
};

bool IsUntouched(const Array& array, int64_t begin, int64_t end) {
  const auto* bytes = array.As<unsigned char>();
  const int64_t item = SizeOf(array.type);
  return std::all_of(bytes + begin * item, bytes + end * item,
                     [](unsigned char byte) { return byte == kUntouched; });
}

void ExpectNear(float found, double wanted, const char* what) {
  if (!(std::fabs(found - wanted) <= 2e-3 * (1 + std::fabs(wanted)))) {
    Fail(std::string(what) + ": " + std::to_string(found) + ", wanted " + std::to_string(wanted));
  }
}

// ---- Number of rows ----

struct RealRows {
  Array array;
  int64_t rows;
  bool valid;
};

// Of `most`: not given, or given, seldom no such number.
RealRows DrawRealRows(int64_t most) {
  const bool given = draw.OneIn(2);
  RealRows real{Array(kS32, {given ? 1 : 0}), most, true};
  real.array.Fill();
  if (given) {
    real.rows = real.array.At<int32_t>(0) = static_cast<int32_t>(
        draw.OneIn(8) ? draw.Strange(most) : draw.In(0, most));
    real.valid = real.rows >= 0 && real.rows <= most;
  }
  return real;
}

// Indices below `limit`, seldom a strange one.
void FillIndices(Array& array, int64_t limit, int64_t odds) {
  array.Allocate();
  for (int64_t i = 0; i < array.Count(); ++i) {
    array.At<int32_t>(i) = static_cast<int32_t>(limit == 0 ? 0 : draw.Below(limit));
  }
  if (array.Count() > 0 && draw.OneIn(odds)) {
    array.At<int32_t>(draw.Below(array.Count())) = draw.Strange(limit);
  }
}

bool AllBelow(const Array& array, int64_t count, int64_t limit) {
  return std::all_of(array.As<int32_t>(), array.As<int32_t>() + count,
                     [&](int32_t i) { return i >= 0 && i < limit; });
}

// ---- The handlers ----

void FuzzRows() {
  const int64_t outer = draw.In(0, 6), inner = draw.In(0, 20), n = draw.In(0, 5);
  Call call{rooflax_rows, {}, {}, {}};
  call.args.emplace_back(draw.Of({kF32, kBf16}), std::vector<int64_t>{outer, inner});
  call.args.emplace_back(kS32, std::vector<int64_t>{n});
  RealRows real = DrawRealRows(n);
  call.args.push_back(std::move(real.array));
  call.rets.emplace_back(kF32, std::vector<int64_t>{n, inner});
  if (call.Mutate()) return call.RunMutated();
  const Array &table = call.args[0], &index = call.args[1], &y = call.rets[0];
  call.args[0].Fill();
  FillIndices(call.args[1], outer, 4);
  if (!call.RunExpecting(real.valid && AllBelow(index, real.rows, outer))) return;
  for (int64_t i = 0; i < real.rows * inner; ++i) {
    const int64_t from = index.At<int32_t>(i / inner) * inner + i % inner;
    Expect(y.At<float>(i) == Decode(table, from), "a row");
  }
  Expect(IsUntouched(y, real.rows * inner, n * inner), "padding was written");
}

void FuzzTransposed() {
  const int64_t rows = draw.In(0, 30), inner = draw.OneIn(20) ? draw.In(200, 600) : draw.In(0, 40);
  const int64_t outer = draw.OneIn(10) ? draw.In(60, 200) : draw.In(0, 40);
  Call call{rooflax_matmul_transposed, {}, {}, {}};
  call.args.emplace_back(kF32, std::vector<int64_t>{rows, inner});
  call.args.emplace_back(draw.Of({kF32, kBf16}), std::vector<int64_t>{outer, inner});
  call.rets.emplace_back(kF32, std::vector<int64_t>{rows, outer});
  if (call.Mutate()) return call.RunMutated();
  for (Array& arg : call.args) arg.Fill();
  if (!call.RunExpecting(true)) return;
  for (int64_t i = 0; i < rows * outer; ++i) {
    double sum = 0;
    for (int64_t k = 0; k < inner; ++k) {
      sum += static_cast<double>(Decode(call.args[0], i / outer * inner + k)) * Decode(call.args[1], i % outer * inner + k);
    }
    ExpectNear(call.rets[0].At<float>(i), static_cast<float>(sum), "a product with a transpose");
  }
}

// A value as a vocabulary's logits hold, seldom one that is none.
void FillLogits(Array& logits) {
  logits.Fill();
  if (logits.Count() > 0 && draw.OneIn(4)) {
    logits.At<float>(draw.Below(logits.Count())) = draw.Of({NAN, INFINITY, -INFINITY, 3e38f, -3e38f});
  }
}

int64_t NaiveArgmax(const float* x, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(x[i])) return i;
    if (x[i] > x[best]) best = i;
  }
  return best;
}

void FuzzArgmax() {
  const int64_t rows = draw.In(0, 4), columns = draw.In(0, 40);
  Call call{rooflax_argmax, {}, {}, {}};
  call.args.emplace_back(kF32, std::vector<int64_t>{rows, columns});
  RealRows real = DrawRealRows(rows);
  call.args.push_back(std::move(real.array));
  call.rets.emplace_back(kS32, std::vector<int64_t>{rows});
  if (call.Mutate()) return call.RunMutated();
  FillLogits(call.args[0]);
  if (!call.RunExpecting(real.valid && columns > 0)) return;
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = call.args[0].As<float>() + row * columns;
    Expect(call.rets[0].At<int32_t>(row) == (row < real.rows ? NaiveArgmax(x, columns) : 0), "argmax");
  }
}

void FuzzNorm() {
  const int64_t rows = draw.In(0, 4), inner = draw.In(0, 40), centred = draw.OneIn(2) ? inner : 0;
  const float eps = 1e-5f;
  Call call{rooflax_norm, {}, {}, {Real("eps", eps)}};
  call.args.emplace_back(kF32, std::vector<int64_t>{rows, inner});
  call.args.emplace_back(kF32, std::vector<int64_t>{inner});
  call.args.emplace_back(kF32, std::vector<int64_t>{centred});
  call.rets.emplace_back(kF32, call.args[0].dims);
  if (call.Mutate()) return call.RunMutated();
  for (Array& arg : call.args) arg.Fill();
  if (!call.RunExpecting(true)) return;
  const float *weight = call.args[1].As<float>(), *bias = call.args[2].As<float>();
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = call.args[0].As<float>() + row * inner;
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < inner && centred > 0; ++i) mean += static_cast<double>(x[i]) / inner;
    for (int64_t i = 0; i < inner; ++i) squares += (x[i] - mean) * (x[i] - mean) / inner;
    for (int64_t i = 0; i < inner; ++i) {
      const double value = (x[i] - mean) / std::sqrt(squares + eps) * weight[i];
      ExpectNear(call.rets[0].At<float>(row * inner + i), value + (centred > 0 ? bias[i] : 0), "a norm");
    }
  }
}

// Sequences that go on from rows of a pool, each with its targets.
void AddRuns(Call& call, int64_t sequences, int64_t targets) {
  for (int i = 0; i < 4; ++i) call.args.emplace_back(kS32, std::vector<int64_t>{sequences});
  for (int i = 0; i < 2; ++i) call.args.emplace_back(kS32, std::vector<int64_t>{sequences, targets});
}

// Their numbers, from argument `first` on. Returns whether they may be; `alone`: no token is of two.
bool DrawRuns(Call& call, size_t first, int64_t tokens, int64_t pool_rows, bool& alone) {
  const int64_t sequences = call.args[first].dims[0], targets = call.args[first + 4].dims[1];
  for (size_t i = 0; i < 6; ++i) call.args[first + i].Allocate();
  const auto number = [&](size_t arg, int64_t i) -> int32_t& { return call.args[first + arg].At<int32_t>(i); };
  int64_t end = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t begin = draw.OneIn(4) ? draw.In(end, tokens) : end;
    end = draw.In(begin, tokens);
    number(0, i) = static_cast<int32_t>(begin);
    number(1, i) = static_cast<int32_t>(end - begin);
    number(2, i) = static_cast<int32_t>(draw.Below(pool_rows));
    number(3, i) = static_cast<int32_t>(draw.Below(2));
    for (int64_t j = 0; j < targets; ++j) {
      number(4, i * targets + j) = static_cast<int32_t>(draw.OneIn(3) ? kNoSlot : draw.Below(pool_rows));
      number(5, i * targets + j) = static_cast<int32_t>(draw.In(0, end - begin));
    }
  }
  if (sequences > 0 && draw.OneIn(6)) {
    const auto arg = static_cast<size_t>(draw.Below(6));
    const int64_t count = call.args[first + arg].Count();
    if (count > 0) number(arg, draw.Below(count)) = draw.Strange(arg < 2 ? tokens : pool_rows);
  }
  std::vector<int64_t> owners(static_cast<size_t>(tokens));
  bool valid = true;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t begin = number(0, i), length = number(1, i), row = number(2, i);
    if (length == 0) continue;
    const bool fits = length > 0 && begin >= 0 && begin + length <= tokens && row >= 0 && row < pool_rows;
    valid &= fits;
    for (int64_t j = 0; j < targets; ++j) {
      const int64_t target = number(4, i * targets + j);
      valid &= target >= 0 && (target < pool_rows || target >= kNoSlot);
    }
    for (int64_t t = begin; fits && t < begin + length; ++t) ++owners[static_cast<size_t>(t)];
  }
  alone = std::all_of(owners.begin(), owners.end(), [](int64_t of) { return of < 2; });
  return valid;
}

// A sequence's tokens one after the other, as the rule is written.
void FuzzDeltaRule() {
  const int64_t tokens = draw.In(0, 8), heads = draw.In(1, 2), group = draw.In(1, 2);
  const int64_t key_dim = draw.In(1, 9);
  const int64_t dim = draw.OneIn(8) ? 128 : draw.OneIn(4) ? draw.In(30, 70) : draw.In(1, 9);
  const int64_t pool_rows = draw.In(1, 6), sequences = draw.In(0, 3), targets = draw.In(0, 2);
  const float eps = 1e-6f;
  Call call{rooflax_delta_rule, {}, {}, {Real("eps", eps)}};
  using Dims = std::vector<int64_t>;
  const Dims keys{tokens, heads, key_dim}, values{tokens, heads, group, dim}, gates{tokens, heads, group};
  for (const Dims& dims : {keys, keys, values, gates, gates}) call.args.emplace_back(kF32, dims);
  call.args.emplace_back(kF32, Dims{pool_rows, heads, group, key_dim, dim});
  AddRuns(call, sequences, targets);
  call.rets.emplace_back(kF32, values);
  call.rets.emplace_back(kF32, call.args[5].dims);
  if (call.Mutate()) return call.RunMutated();
  for (size_t i = 0; i < 6; ++i) call.args[i].Fill();
  bool alone;
  const bool valid = DrawRuns(call, 6, tokens, pool_rows, alone);
  if (!call.RunExpecting(valid) || !alone) return;
  const auto number = [&](size_t arg, int64_t i) { return call.args[arg].At<int32_t>(i); };
  const auto of = [&](size_t arg, int64_t i) { return static_cast<double>(call.args[arg].At<float>(i)); };
  const auto factor = [&](size_t arg, int64_t first) {
    double squares = eps;
    for (int64_t d = 0; d < key_dim; ++d) squares += of(arg, first + d) * of(arg, first + d);
    return 1 / std::sqrt(squares);
  };
  const int64_t matrix = key_dim * dim, each = heads * group * matrix;
  std::vector<double> pool(static_cast<size_t>(pool_rows * each)), o(static_cast<size_t>(tokens * heads * group * dim));
  for (int64_t i = 0; i < pool_rows * each; ++i) pool[static_cast<size_t>(i)] = of(5, i);
  for (int64_t i = 0; i < sequences; ++i) {
    for (int64_t m = 0; m < heads * group && number(7, i) > 0; ++m) {
      std::vector<double> state(static_cast<size_t>(matrix));
      const auto at = [&](int64_t r, int64_t c) -> double& { return state[static_cast<size_t>(r * dim + c)]; };
      const double* from = pool.data() + number(8, i) * each + m * matrix;
      if (number(9, i) == 0) std::copy(from, from + matrix, state.begin());
      for (int64_t n = 0; n < number(7, i); ++n) {
        const int64_t t = number(6, i) + n, key = (t * heads + m / group) * key_dim;
        const int64_t one = t * heads * group + m;
        const double q = factor(0, key) / std::sqrt(static_cast<double>(key_dim)), k = factor(1, key);
        for (double& s : state) s *= std::exp(of(3, one));
        for (int64_t c = 0; c < dim; ++c) {
          double error = of(2, one * dim + c), out = 0;
          for (int64_t r = 0; r < key_dim; ++r) error -= at(r, c) * of(1, key + r) * k;
          for (int64_t r = 0; r < key_dim; ++r) {
            at(r, c) += of(1, key + r) * k * of(4, one) * error;
            out += at(r, c) * of(0, key + r) * q;
          }
          o[static_cast<size_t>(one * dim + c)] = out;
        }
        for (int64_t j = 0; j < targets; ++j) {
          const int64_t target = number(10, i * targets + j);
          if (number(11, i * targets + j) != n + 1 || target >= pool_rows) continue;
          std::copy(state.begin(), state.end(), pool.begin() + target * each + m * matrix);
        }
      }
    }
  }
  for (size_t i = 0; i < o.size(); ++i) ExpectNear(call.rets[0].At<float>(static_cast<int64_t>(i)), o[i], "o");
  for (size_t i = 0; i < pool.size(); ++i) {
    ExpectNear(call.rets[1].At<float>(static_cast<int64_t>(i)), pool[i], "a state");
  }
}

// Attention of whole sequences, of which `gradients` are asked for or none; positions of any order.
void FuzzWholeCall(bool gradients) {
  const bool large = draw.OneIn(40);  // several tiles, and worth a second thread
  const int64_t dim = draw.Of<int64_t>({0, 7, 16, 16, 32, 48}), kv = draw.In(0, 2), group = draw.In(1, 3);
  const int64_t rows = draw.In(0, 2), heads = kv * group + (draw.OneIn(20) ? 1 : 0);
  const int64_t queries = large ? draw.In(60, 140) : draw.In(0, 9);
  const bool apart = draw.OneIn(2);
  const int64_t keys = apart && !draw.OneIn(20) ? queries : large ? draw.In(60, 140) : draw.In(0, 40);
  const int64_t window = draw.OneIn(40) ? draw.Of<int64_t>({-1, INT64_MIN, INT64_MAX}) : draw.OneIn(2) ? 0 : draw.In(1, 9);
  const int64_t ahead = draw.OneIn(40) ? draw.Of<int64_t>({-1, INT64_MIN, INT64_MAX})
                                       : draw.OneIn(2) ? 0 : draw.Of<int64_t>({1, 3, INT32_MAX});
  const float scale = 0.25f;
  Call call{gradients ? rooflax_whole_attention_gradients : rooflax_whole_attention,
            {}, {}, {Whole("ahead", ahead), Real("scale", scale), Whole("window", window)}};
  using Dims = std::vector<int64_t>;
  const Dims q_dims{rows, queries, heads, dim}, k_dims{rows, kv, keys, dim}, sums_dims{rows, heads, queries};
  call.args.emplace_back(kF32, q_dims);
  for (int i = 0; i < 2; ++i) call.args.emplace_back(kF32, k_dims);
  call.args.emplace_back(kS32, Dims{rows, queries});
  call.args.emplace_back(kS32, Dims{rows, keys});
  call.args.emplace_back(kS32, Dims{rows});
  call.args.emplace_back(kS32, apart ? Dims{rows, keys} : Dims{0, 0});
  call.args.emplace_back(kF32, Dims{draw.OneIn(2) ? heads : 0});
  if (gradients) {
    call.args.emplace_back(kF32, q_dims);
    call.args.emplace_back(kF32, sums_dims);
    call.args.emplace_back(kF32, q_dims);
    for (const Dims& dims : {q_dims, k_dims, k_dims}) call.rets.emplace_back(kF32, dims);
  } else {
    call.rets.emplace_back(kF32, q_dims);
    call.rets.emplace_back(kF32, sums_dims);
  }
  if (call.Mutate()) return call.RunMutated();
  for (Array& arg : call.args) arg.Fill();
  const bool ordered = draw.OneIn(2);
  for (size_t i = 3; i < 7; ++i) {
    for (int64_t j = 0; ordered && j < call.args[i].Count(); ++j) {
      const int64_t length = i == 3 ? queries : keys;
      call.args[i].At<int32_t>(j) = static_cast<int32_t>(i == 5 ? draw.In(0, 150) : i == 6 ? j % length / 50 : j % length);
    }
  }
  const bool valid = dim % 16 == 0 && kv > 0 && heads % kv == 0 && window >= 0 && window <= INT32_MAX && ahead >= 0 &&
                     ahead <= INT32_MAX && (!apart || rows * keys == 0 || keys == queries);
  const auto of = [&](size_t arg, int64_t i) { return static_cast<double>(call.args[arg].At<float>(i)); };
  const auto whole = [&](size_t arg, int64_t i) { return static_cast<int64_t>(call.args[arg].At<int32_t>(i)); };
  const auto size = static_cast<size_t>(rows * queries * heads * dim), key_size = static_cast<size_t>(rows * kv * keys * dim);
  std::vector<double> out(size), log_sums(static_cast<size_t>(rows * heads * queries)), dq(size), dk(key_size), dv(key_size);
  for (int64_t n = 0; valid && n < rows * heads * queries; ++n) {
    const int64_t b = n / heads / queries, head = n / queries % heads, i = n % queries;
    const int64_t at = ((b * queries + i) * heads + head) * dim, first = (b * kv + head / (heads / kv)) * keys * dim;
    std::vector<double> shares(static_cast<size_t>(keys));
    double total = call.args[7].Count() > 0 ? std::exp(of(7, head)) : 0;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t query = whole(3, b * queries + i), key = whole(4, b * keys + j);
      // Positions of the lowest and of the highest number are none.
      bool seen = key < whole(5, b) && key <= query + ahead && key < INT32_MAX && key > INT32_MIN;
      seen = seen && (window == 0 || key > query - window);
      if (call.args[6].Count() > 0) seen = seen && whole(6, b * keys + i) == whole(6, b * keys + j);
      if (!seen) continue;
      double score = 0;
      for (int64_t d = 0; d < dim; ++d) score += of(0, at + d) * of(1, first + j * dim + d);
      total += shares[static_cast<size_t>(j)] = std::exp(score * static_cast<double>(scale));
    }
    log_sums[static_cast<size_t>(n)] = total > 0 ? std::log(total) : 0;
    double delta = 0;
    for (int64_t d = 0; d < dim; ++d) {
      double sum = 0;
      for (int64_t j = 0; j < keys && total > 0; ++j) sum += shares[static_cast<size_t>(j)] / total * of(2, first + j * dim + d);
      out[static_cast<size_t>(at + d)] = sum;
      if (gradients) delta += sum * of(10, at + d);
    }
    for (int64_t j = 0; gradients && j < keys && total > 0; ++j) {
      const double share = shares[static_cast<size_t>(j)] / total;
      double grad = -delta;
      for (int64_t d = 0; d < dim; ++d) grad += of(10, at + d) * of(2, first + j * dim + d);
      grad *= share * static_cast<double>(scale);
      for (int64_t d = 0; d < dim; ++d) {
        const auto key = static_cast<size_t>(first + j * dim + d);
        dq[static_cast<size_t>(at + d)] += grad * of(1, first + j * dim + d);
        dk[key] += grad * of(0, at + d);
        dv[key] += share * of(10, at + d);
      }
    }
  }
  if (gradients) {
    for (size_t i = 0; i < size; ++i) call.args[8].At<float>(static_cast<int64_t>(i)) = static_cast<float>(out[i]);
    for (size_t i = 0; i < log_sums.size(); ++i) call.args[9].At<float>(static_cast<int64_t>(i)) = static_cast<float>(log_sums[i]);
  }
  if (!call.RunExpecting(valid)) return;
  const auto near = [&](size_t ret, const std::vector<double>& wanted, const char* what) {
    for (size_t i = 0; i < wanted.size(); ++i) ExpectNear(call.rets[ret].At<float>(static_cast<int64_t>(i)), wanted[i], what);
  };
  near(0, gradients ? dq : out, gradients ? "a gradient of q" : "an output");
  near(1, gradients ? dk : log_sums, gradients ? "a gradient of k" : "a sum");
  if (gradients) near(2, dv, "a gradient of v");
}
void FuzzWhole() { FuzzWholeCall(false); }
void FuzzWholeGradients() { FuzzWholeCall(true); }

void FuzzCausalConv() {
  const int64_t tokens = draw.In(0, 8), channels = draw.In(1, 20), taps = draw.In(1, 4), length = taps - 1;
  const int64_t pool_rows = draw.In(1, 6), sequences = draw.In(0, 3);
  using Dims = std::vector<int64_t>;
  Call call{rooflax_causal_conv, {}, {}, {}};
  call.args.emplace_back(kF32, Dims{tokens, channels});
  call.args.emplace_back(kF32, Dims{channels, taps});
  const bool is_split = channels % 2 == 0 && draw.In(0, 1) == 1;  // channels as two axes
  call.args.emplace_back(kF32, is_split ? Dims{pool_rows, 2, channels / 2, length}
                                        : Dims{pool_rows, channels, length});
  AddRuns(call, sequences, draw.In(0, 2));
  call.rets.emplace_back(kF32, call.args[0].dims);
  call.rets.emplace_back(kF32, call.args[2].dims);
  if (call.Mutate()) return call.RunMutated();
  for (size_t i = 0; i < 3; ++i) call.args[i].Fill();
  bool alone;
  const bool valid = DrawRuns(call, 3, tokens, pool_rows, alone);
  if (!call.RunExpecting(valid) || !alone) return;
  const Array &x = call.args[0], &w = call.args[1], &pool = call.args[2];
  const auto number = [&](size_t arg, int64_t i) { return call.args[3 + arg].At<int32_t>(i); };
  const int64_t size = channels * length, targets = call.args[7].dims[1];
  std::vector<float> out(static_cast<size_t>(x.Count())), states(static_cast<size_t>(pool.Count()));
  for (int64_t i = 0; i < pool.Count(); ++i) states[static_cast<size_t>(i)] = pool.At<float>(i);
  for (int64_t i = 0; i < sequences; ++i) {
    const auto input = [&](int64_t n, int64_t c) {
      if (n >= 0) return x.At<float>((number(0, i) + n) * channels + c);
      return number(3, i) != 0 ? 0.0f : pool.At<float>(number(2, i) * size + c * length + length + n);
    };
    for (int64_t n = 0; n < number(1, i); ++n) {
      for (int64_t c = 0; c < channels; ++c) {
        float& y = out[static_cast<size_t>((number(0, i) + n) * channels + c)];
        for (int64_t j = 0; j < taps; ++j) y += w.At<float>(c * taps + j) * input(n - length + j, c);
      }
    }
    for (int64_t j = 0; j < targets && number(1, i) > 0; ++j) {
      const int64_t target = number(4, i * targets + j), after = number(5, i * targets + j);
      if (target >= pool_rows || after < 1 || after > number(1, i)) continue;
      for (int64_t k = 0; k < size; ++k) {
        states[static_cast<size_t>(target * size + k)] = input(after - length + k % length, k / length);
      }
    }
  }
  for (int64_t i = 0; i < x.Count(); ++i) {
    ExpectNear(call.rets[0].At<float>(i), static_cast<double>(out[static_cast<size_t>(i)]), "y");
  }
  for (int64_t i = 0; i < pool.Count(); ++i) {
    Expect(call.rets[1].At<float>(i) == states[static_cast<size_t>(i)], "a state");
  }
}

void FuzzCacheWrite() {
  const int64_t blocks = draw.In(0, 4), heads = draw.In(1, 3), size = draw.In(1, 4);
  const int64_t dim = draw.In(1, 20), tokens = draw.OneIn(50) ? 40 : draw.In(0, 6);
  const int64_t slots = blocks * size;
  Call call{rooflax_cache_write, {}, {}, {}};
  const Type type = draw.Of({kF32, kBf16, kF16});
  call.args.emplace_back(type, std::vector<int64_t>{blocks, heads, size, dim});
  call.args.emplace_back(kF32, std::vector<int64_t>{tokens, heads, dim});
  call.args.emplace_back(kS32, std::vector<int64_t>{tokens});
  call.rets.emplace_back(type, call.args[0].dims);
  call.in_place = draw.OneIn(2);
  if (call.Mutate()) return call.RunMutated();
  const Array &pool = call.args[0], &x = call.args[1], &where = call.args[2], &out = call.rets[0];
  call.args[0].Fill();
  call.args[1].Fill();
  FillIndices(call.args[2], slots, 6);
  for (int64_t token = 0; token < tokens; ++token) {
    if (slots > 0 && !draw.OneIn(4)) continue;
    where.At<int32_t>(token) = draw.Of<int32_t>({static_cast<int32_t>(kNoSlot), INT_MAX,
                                                 static_cast<int32_t>(kNoSlot + slots)});
  }
  const bool valid = std::all_of(where.As<int32_t>(), where.As<int32_t>() + tokens, [&](int32_t slot) {
    return slot >= kNoSlot || (slot >= 0 && slot < slots);
  });
  const Array old = pool.Part(1, 0, pool.dims);
  if (!call.RunExpecting(valid)) return;
  std::vector<int64_t> writer(static_cast<size_t>(slots), -1);  // the last token of each slot
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t slot = where.At<int32_t>(token);
    if (slot < slots) writer[static_cast<size_t>(slot)] = token;
  }
  for (int64_t i = 0; i < old.Count(); ++i) {
    const int64_t d = i % dim, offset = i / dim % size, head = i / dim / size % heads;
    const int64_t token = writer[static_cast<size_t>(i / dim / size / heads * size + offset)];
    const float wanted = token < 0 ? Decode(old, i) : x.At<float>((token * heads + head) * dim + d);
    Expect(Decode(out, i) == wanted, "a cache's element");
  }
}

struct Sequence {
  int64_t first_position, start, count, position, context;
};

void CheckAttention(const Call& call, const std::vector<Sequence>& rows, int64_t window, int64_t ahead,
                    float scale, float cap) {
  const Array &q = call.args[0], &k = call.args[1], &v = call.args[2], &tables = call.args[5];
  const Array &sinks = call.args[11], &bias = call.args[12], &out = call.rets[0];
  const int64_t tokens = q.dims[0], heads = q.dims[1], dim = q.dims[2], kv = k.dims[1], size = k.dims[2];
  const int64_t slots = tables.dims[1] * size;
  std::vector<int> owners(static_cast<size_t>(tokens));
  for (const Sequence& row : rows) {
    for (int64_t t = 0; t < row.count; ++t) ++owners[static_cast<size_t>(row.start + t)];
  }
  for (int64_t t = 0; t < tokens; ++t) {
    if (owners[static_cast<size_t>(t)] > 0) continue;
    Expect(IsUntouched(out, t * heads * dim, (t + 1) * heads * dim), "padding was written");
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    const Sequence& row = rows[r];
    for (int64_t i = 0; i < row.count * heads; ++i) {
      const int64_t token = row.start + i / heads, head = i % heads, here = row.position + i / heads;
      if (owners[static_cast<size_t>(token)] > 1) continue;  // of rows that overlap any may be last
      const int64_t query = (token * heads + head) * dim;
      std::vector<double> wanted(static_cast<size_t>(dim));
      double largest = 0, total = sinks.Count() == 0 ? 0 : std::exp(static_cast<double>(sinks.At<float>(head)));
      for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t position = row.first_position + slot;
        if (position >= row.context || position > here + ahead) continue;
        if (window > 0 && position <= here - window) continue;
        const int64_t block = tables.At<int32_t>(static_cast<int64_t>(r) * tables.dims[1] + slot / size);
        const int64_t at = (block * kv + head / (heads / kv)) * size + slot % size;
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) score += static_cast<double>(Decode(q, query + d)) * Decode(k, at * dim + d);
        const bool bytes = call.args[3].Count() > 0;
        score *= scale * (bytes ? call.args[3].At<float>(at) : 1);
        if (cap > 0) score = cap * std::tanh(score / cap);
        if (bias.Count() > 0) {
          const int64_t distances = bias.dims[1];
          score += bias.At<float>(head * distances + distances / 2 + position - here);
        }
        const double weight = std::exp(score);
        total += weight;
        for (int64_t d = 0; d < dim; ++d) {
          const double value = Decode(v, at * dim + d) * (bytes ? call.args[4].At<float>(at) : 1);
          largest = std::max(largest, std::abs(value));
          wanted[static_cast<size_t>(d)] += weight * value;
        }
      }
      for (int64_t d = 0; d < dim; ++d) {
        const double value = total > 0 ? wanted[static_cast<size_t>(d)] / total : 0;
        if (q.type == kF32) {
          ExpectNear(Decode(out, query + d), value, "attention");
        } else {  // shares and sums of numbers up to `largest` are rounded to bfloat16
          const bool near = std::abs(Decode(out, query + d) - value) <= 0x1p-7 * (std::abs(value) + largest);
          Expect(near, "attention of bfloat16");
        }
      }
    }
  }
}

void FuzzAttention() {
  const bool large = draw.OneIn(500);  // worth a second thread
  const int64_t dim = draw.Of<int64_t>({0, 1, 3, 16, 16, 19, 32}), kv = draw.In(1, 2);
  const int64_t heads = kv * draw.In(1, 3), size = draw.In(1, 4), per_row = large ? 40 : draw.In(0, 4);
  const int64_t blocks = draw.In(0, 5), num_rows = draw.In(0, 3), tokens = large ? 30 : draw.In(0, 5);
  const int64_t window = draw.OneIn(40) ? draw.Of<int64_t>({-1, INT64_MIN, INT64_MAX})
                                        : draw.OneIn(2) ? 0 : draw.In(1, 6);
  const int64_t ahead = draw.OneIn(40) ? draw.Of<int64_t>({-1, INT64_MIN, INT64_MAX})
                                       : draw.OneIn(2) ? 0 : draw.Of<int64_t>({1, 3, INT32_MAX});
  const Type type = draw.Of({kF32, kBf16, kF16, kS8, kFp8});
  const bool bytes = type == kS8 || type == kFp8;
  const float scale = 0.25f;
  const float cap = draw.OneIn(3) ? 2.0f : 0.0f;
  Call call{rooflax_attention, {}, {},
            {Whole("ahead", ahead), Real("cap", cap), Real("scale", scale), Whole("window", window)}};
  const std::vector<int64_t> pool{blocks, kv, size, dim};
  call.args.emplace_back(draw.OneIn(3) ? kBf16 : kF32, std::vector<int64_t>{tokens, heads, dim});
  for (int i = 0; i < 2; ++i) call.args.emplace_back(type, pool);
  for (int i = 0; i < 2; ++i) {
    call.args.emplace_back(kF32, bytes ? std::vector<int64_t>{blocks, kv, size} : std::vector<int64_t>{0});
  }
  call.args.emplace_back(kS32, std::vector<int64_t>{num_rows, per_row});
  for (int i = 0; i < 5; ++i) call.args.emplace_back(kS32, std::vector<int64_t>{num_rows});
  call.args.emplace_back(kF32, std::vector<int64_t>{draw.OneIn(2) ? heads : 0});
  const int64_t reach = draw.In(0, 200);
  const bool biased = draw.OneIn(3);
  call.args.emplace_back(kF32, std::vector<int64_t>{biased ? heads : 0, 2 * reach + 1});
  call.rets.emplace_back(call.args[0].type, call.args[0].dims);
  if (call.Mutate()) return call.RunMutated();
  for (Array& arg : call.args) {
    if (arg.type != kS32) arg.Fill();
  }
  for (size_t i = 3; i < 5; ++i) {
    for (int64_t k = 0; k < call.args[i].Count(); ++k) call.args[i].At<float>(k) /= 64;
  }
  FillIndices(call.args[5], blocks, 3);
  for (size_t i = 6; i < 11; ++i) call.args[i].Allocate();
  const int64_t slots = per_row * size;
  for (int64_t r = 0, start = 0; r < num_rows; ++r) {  // a valid sequence
    const int64_t count = draw.OneIn(5) ? 0 : draw.In(0, std::min(tokens - start, slots));
    const int64_t first = draw.OneIn(3) ? draw.In(0, 100) : 0;
    const int64_t position = first + draw.In(0, slots - count);
    const int64_t context = position + (draw.OneIn(4) ? draw.In(0, count) : count);
    const int64_t numbers[5] = {first, start, count, position, context};
    for (size_t i = 0; i < 5; ++i) call.args[6 + i].At<int32_t>(r) = static_cast<int32_t>(numbers[i]);
    start += draw.OneIn(20) ? 0 : count + draw.In(0, 1);
    start = std::min(start, tokens);
  }
  if (num_rows > 0 && draw.OneIn(2)) {  // and then perhaps none
    call.args[static_cast<size_t>(draw.In(6, 10))].At<int32_t>(draw.Below(num_rows)) =
        draw.OneIn(2) ? draw.Strange(tokens) : static_cast<int32_t>(draw.In(-2, 120));
  }
  bool valid = dim > 0 && window >= 0 && ahead >= 0 && ahead <= INT32_MAX;
  std::vector<Sequence> rows;
  for (int64_t r = 0; r < num_rows; ++r) {
    const auto of = [&](size_t i) -> int64_t { return call.args[i].At<int32_t>(r); };
    const Sequence row{of(6), of(7), of(8), of(9), of(10)};
    rows.push_back(row);
    if (row.count == 0) continue;
    valid &= row.count > 0 && row.start >= 0 && row.start + row.count <= tokens;
    valid &= row.first_position >= 0 && row.position >= row.first_position;
    if (!valid) continue;
    const int64_t past = std::min(row.position + row.count + ahead, row.context) - row.first_position;
    valid &= past <= slots;
    if (biased) {
      const int64_t last = row.position + row.count - 1;
      const int64_t back = window > 0 ? std::max(row.first_position, last + 1 - window)
                                      : row.first_position;
      valid &= std::min(ahead, row.context - 1 - row.position) <= reach && last - back <= reach;
    }
    const int64_t oldest = window > 0 ? row.position + 1 - window - row.first_position : 0;
    for (int64_t block = 0; block < per_row && past <= slots; ++block) {
      if (block * size >= past || (block + 1) * size <= oldest) continue;
      const int32_t number = call.args[5].At<int32_t>(r * per_row + block);
      valid &= number >= 0 && number < blocks;
    }
  }
  if (call.RunExpecting(valid)) CheckAttention(call, rows, window, ahead, scale, cap);
}

// SamplingRow of any kind: the ids need not be tokens.
void FillSamplingRows(Array& params, int64_t vocab, bool plain) {
  using rooflax::SamplingRow;
  params.Allocate();
  const auto id = [&] { return draw.OneIn(3) ? draw.Strange(vocab) : static_cast<int32_t>(draw.Below(vocab)); };
  for (int64_t slot = 0; slot < params.dims[0]; ++slot) {
    SamplingRow w{};
    std::fill(std::begin(w.allowed), std::end(w.allowed), -1);
    std::fill(std::begin(w.stop), std::end(w.stop), -1);
    w.top_p = w.repetition_penalty = 1;
    w.num_logprobs = static_cast<int32_t>(draw.In(-1, 3));
    if (!plain) {
      w.temperature = draw.Of({0.0f, 0.7f, 1.0f, 1e-38f, INFINITY, NAN, -1.0f});
      w.top_p = draw.Of({1.0f, 0.9f, 0.0f, -1.0f, NAN});
      w.min_p = draw.Of({0.0f, 0.1f, 2.0f});
      w.repetition_penalty = draw.Of({1.0f, 1.5f, 0.0f});
      w.presence_penalty = draw.Of({0.0f, 0.5f});
      w.seed = static_cast<uint32_t>(draw.Next());
      w.top_k = draw.OneIn(2) ? 0 : draw.Strange(vocab);
      w.scores_adjusted = static_cast<int32_t>(draw.In(0, 1));
      w.is_masked = static_cast<int32_t>(draw.In(0, 1));
      w.min_position = draw.Of({0, 5, INT_MAX});
      for (int64_t i = draw.In(0, 3); i > 0; --i) {
        const int64_t at = draw.Below(SamplingRow::kBias);
        w.bias_ids[at] = id();
        w.bias_values[at] = draw.Float();
      }
      for (int64_t i = draw.OneIn(2) ? draw.In(0, 4) : 0; i > 0; --i) {
        w.allowed[draw.Below(SamplingRow::kAllowed)] = id();
      }
      for (int64_t i = draw.In(0, 3); i > 0; --i) w.stop[draw.Below(SamplingRow::kStop)] = id();
    }
    std::memcpy(params.As<char>() + slot * static_cast<int64_t>(sizeof(w)), &w, sizeof(w));
  }
}

// Who makes the masks of a step: nobody, an exchange that has them already, or one that does not fit.
struct MaskOffer {
  Array array;
  bool valid = true;
  int32_t number = 0;
  MaskOffer(Array array) : array(std::move(array)) {}
  MaskOffer(MaskOffer&& other)
      : array(std::move(other.array)), valid(other.valid), number(std::exchange(other.number, 0)) {}
  ~MaskOffer() { rooflax_masks_delete(number); }
};

MaskOffer DrawMaskOffer(int64_t rows, int64_t slots, int64_t words) {
  MaskOffer offer{Array(kS32, {draw.OneIn(2) ? 0 : 2})};
  offer.array.Allocate();
  if (offer.array.dims[0] == 0) return offer;
  const int32_t step = draw.OneIn(4) ? draw.Strange(9) : static_cast<int32_t>(draw.In(0, 3));
  offer.array.At<int32_t>(1) = step;
  const int kind = static_cast<int>(draw.In(0, 2));
  if (kind == 0) {  // a number that nobody was given, but for 0
    offer.array.At<int32_t>(0) = draw.OneIn(2) ? 0 : -1 - static_cast<int32_t>(draw.In(0, 9));
    offer.valid = offer.array.At<int32_t>(0) == 0;
    return offer;
  }
  const int64_t other = kind == 2 ? draw.In(0, 1) : 0;
  offer.number = rooflax_masks_new(rows + 1, slots + other, words);
  offer.array.At<int32_t>(0) = offer.number;
  if (offer.number == 0) return offer;  // it has no slots or no words
  rooflax_masks_begin(offer.number);
  if (int32_t* masks = rooflax_masks_words(offer.number)) {
    for (int64_t i = 0; i < (slots + other) * words; ++i) masks[i] = static_cast<int32_t>(draw.Next());
  }
  rooflax_masks_publish(offer.number, step);
  const bool ended = draw.OneIn(5);
  if (ended) rooflax_masks_end(offer.number);
  offer.valid = other == 0 && step >= 0 && !(ended && step > 0);
  return offer;
}

void FuzzSample() {
  using rooflax::SamplingRow;
  const int64_t rows = draw.In(0, 3), slots = draw.In(0, 2), pending = draw.In(0, 3);
  const int64_t vocab = draw.OneIn(50) ? draw.In(1100, 1500) : draw.In(1, 70);
  const int64_t top = draw.In(1, std::min<int64_t>(vocab, 5)), words = draw.OneIn(2) ? (vocab + 31) / 32 : 0;
  using Dims = std::vector<int64_t>;
  Call call{rooflax_sample, {}, {}, {}};
  call.args.emplace_back(kF32, Dims{rows, vocab});
  call.args.emplace_back(kS32, Dims{slots, static_cast<int64_t>(sizeof(SamplingRow) / 4)});
  call.args.emplace_back(kS32, Dims{rows});
  call.args.emplace_back(kPred, Dims{slots, vocab});
  call.args.emplace_back(kS32, Dims{slots, vocab});
  call.args.emplace_back(kS32, Dims{rows});
  call.args.emplace_back(kS32, words == 0 ? Dims{0, 0} : Dims{slots, words});
  call.args.emplace_back(kS32, pending == 0 ? Dims{0, 0} : Dims{rows, pending});
  RealRows real = DrawRealRows(rows);
  call.args.push_back(std::move(real.array));
  MaskOffer offer = DrawMaskOffer(rows, slots, words);
  call.args.push_back(std::move(offer.array));
  for (Type type : {kS32, kPred, kPred, kF32}) call.rets.emplace_back(type, Dims{rows});
  for (Type type : {kS32, kF32}) call.rets.emplace_back(type, Dims{rows, top});
  if (call.Mutate()) {
    rooflax_masks_end(offer.number);  // or it may be waited for
    return call.RunMutated();
  }
  const bool plain = draw.OneIn(4);
  FillLogits(call.args[0]);
  FillSamplingRows(call.args[1], vocab, plain);
  for (size_t i : {2, 3, 4, 6, 7}) call.args[i].Fill();
  FillIndices(call.args[5], slots, 6);
  if (!call.RunExpecting(real.valid && offer.valid && AllBelow(call.args[5], real.rows, slots))) return;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t token = call.rets[0].At<int32_t>(row);
    const auto is_true = [&](size_t ret) { return call.rets[ret].At<uint8_t>(row) == 1; };
    if (row >= real.rows) {
      Expect(token == 0 && is_true(1) && is_true(2), "padding of the sampler");
      continue;
    }
    Expect(token >= 0 && token < vocab, "a token outside the vocabulary");
    Expect(AllBelow(call.rets[4].Part(rows, row, {top}), top, vocab), "a top token outside the vocabulary");
    const int64_t slot = call.args[5].At<int32_t>(row);
    SamplingRow w;
    std::memcpy(&w, call.args[1].As<char>() + slot * static_cast<int64_t>(sizeof(w)), sizeof(w));
    const float* x = call.args[0].As<float>() + row * vocab;
    if (plain) Expect(token == NaiveArgmax(x, vocab), "the most likely token");
    if (!is_true(1) || !is_true(2)) continue;
    if (w.is_limited()) {
      Expect(std::find(w.allowed, std::end(w.allowed), token) != std::end(w.allowed), "an id that is not allowed");
    }
    if (w.is_masked > 0 && words > 0) {
      const int32_t* masks = call.args[6].As<int32_t>();
      if (offer.number != 0 && call.args[9].At<int32_t>(1) > 0) masks = rooflax_masks_words(offer.number);
      const auto word = static_cast<uint32_t>(masks[slot * words + token / 32]);
      Expect((word >> (token % 32) & 1) != 0, "an id outside the mask");
    }
    if (call.args[2].At<int32_t>(row) < w.min_position) {
      Expect(std::find(w.stop, std::end(w.stop), token) == std::end(w.stop), "a stop id too early");
    }
  }
}

constexpr int64_t kTwoTerms = 3;  // of `bytes`: activations are the sum of two in int8

// A matmul's sizes: what its arrays are made of.
struct Matmul {
  int64_t layout, bytes, narrow, kind, gated, rows, inner, outer, stack, selected, biases, norms;
  int64_t supers, lines;  // of scales of kSuper
  bool has_residual, is_hostile;

  // Of ggml's block types, which follow MXFP4: bits of a code, and how its scales lie. Behind them
  // are fp8 in groups, nf4 and NVFP4, with float32 scales, and bfloat16 in pairs.
  bool IsBlock() const { return layout >= 7 && layout < 18; }
  bool HasFloatScales() const { return layout >= 18 && layout < 21; }
  bool IsOfPairs() const { return layout == 21; }
  int64_t Bits() const { return int64_t{"45523456446"[layout - 7]} - '0'; }
  bool IsPair() const { return layout == 7 || layout == 9; }
  bool IsSuper() const { return IsBlock() && !IsPair() && layout != 8 && layout != 15 && layout != 17; }
  bool ScalesFit() const {
    const int64_t groups = inner / 32;
    return !IsSuper() || (groups % supers == 0 && lines == 1 + (groups / supers + 1) / 2);
  }
  Type ScaleType() const {
    if (IsPlain() || IsPerOutput() || HasFloatScales()) return kF32;
    return layout == 6 ? kU8 : IsPair() || IsSuper() ? kU32 : kF16;
  }
  bool IsPlain() const { return layout < 2 || IsOfPairs(); }
  bool IsPerOutput() const { return layout == 2 || layout == 3; }
  int64_t Pair(int64_t k, int64_t n) const {  // where w[k, n] lies
    return ((n / 16 * ((inner + 31) / 32) + k / 32) * 16 + k % 32 / 2) * 32 + n % 16 * 2 + k % 2;
  }
  int64_t Panels() const { return (outer + 15) / 16; }
  std::vector<Attribute> Attributes() const {
    return {Real("alpha", 1.7f), Whole("before", kind), Whole("bytes", bytes), Real("eps", 1e-3f),
            Whole("gated", gated), Whole("layout", layout), Real("limit", 7),
            Whole("narrow", narrow)};
  }
  std::vector<int64_t> Weight(bool stacked) const {
    std::vector<int64_t> dims;
    if (stacked) dims.push_back(stack);
    for (int64_t dim : layout == 0       ? std::vector<int64_t>{inner, outer}
                       : layout == 1     ? std::vector<int64_t>{outer, inner}
                       : IsOfPairs()     ? std::vector<int64_t>{Panels(), (inner + 31) / 32, 16, 16, 2}
                       : IsPerOutput()   ? std::vector<int64_t>{Panels(), (inner + 3) / 4, 16, 4}
                       : std::vector<int64_t>{Panels(), inner / 32, layout == 4 || layout == 18 ? 8 : IsBlock() ? Bits() : 4, 16, 4}) {
      dims.push_back(dim);
    }
    return dims;
  }
  std::vector<int64_t> Scales(int64_t members) const {
    if (IsSuper()) return {members, Panels(), supers, lines, 16};
    return {members * (IsPlain() ? 0 : Panels() * 16 * (IsPerOutput() ? 1 : inner / (layout == 20 ? 16 : 32)))};
  }
  int64_t Sums() const { return layout == 2 ? Panels() * 16 : 0; }
};

// The row as a call of its own, with its member of everything: the same bits.
void CheckMatmulRow(const Call& call, const Matmul& p, int64_t row) {
  const Array& select = call.args[8];
  const int64_t member = p.selected == 0 ? 0 : select.At<int32_t>(p.selected == 1 ? 0 : row);
  Call alone{rooflax_matmul, {}, {}, p.Attributes()};
  auto add = [&](size_t i, int64_t members, int64_t number, std::vector<int64_t> dims) {
    alone.args.push_back(call.args[i].Part(members, number, std::move(dims)));
  };
  add(0, p.rows, row, {1, call.args[0].dims[1]});
  add(1, p.stack, member, p.Weight(false));
  add(2, p.stack, member, p.Scales(1));
  add(3, p.stack, member, {p.Sums()});
  add(4, p.biases, p.biases == 0 ? 0 : member % p.biases, {p.biases == 0 ? 0 : p.outer});
  p.has_residual ? add(5, p.rows, row, {1, p.outer}) : add(5, 0, 0, {0});
  // One norm for all rows: that of the first member in order.
  int64_t first = member;
  for (int64_t i = 0; p.selected > 1 && i < call.rets[0].dims[0]; ++i) {
    if (!IsUntouched(call.rets[0], i * p.outer, (i + 1) * p.outer)) {
      first = std::min<int64_t>(first, select.At<int32_t>(i));
    }
  }
  for (size_t i : {6, 7}) {
    const bool there = call.args[i].Count() > 0;
    add(i, there ? p.norms : 0, there ? first / (p.stack / p.norms) : 0, {there ? p.inner : 0});
  }
  for (int i = 0; i < 2; ++i) {
    alone.args.emplace_back(kS32, std::vector<int64_t>{0});
    alone.args.back().Allocate();
  }
  alone.rets.emplace_back(kF32, std::vector<int64_t>{1, p.outer});
  const std::string why = alone.Run();
  if (!why.empty()) Fail("a row alone was rejected: " + why);
  const float* found = call.rets[0].As<float>() + row * p.outer;
  for (int64_t n = 0; n < p.outer; ++n) {
    const float own = alone.rets[0].At<float>(n);
    const bool both_nan = p.is_hostile && std::isnan(own) && std::isnan(found[n]);
    Expect(both_nan || std::memcmp(found + n, &own, sizeof(own)) == 0, "a row among others");
  }
  if (!p.IsPlain() || p.kind != 0 || p.narrow) return;
  for (int64_t n = 0; n < p.outer; ++n) {
    double sum = 0;
    for (int64_t k = 0; k < p.inner; ++k) {
      sum += alone.args[0].At<float>(k) *
             Decode(alone.args[1], p.layout == 0   ? k * p.outer + n
                                   : p.layout == 1 ? n * p.inner + k
                                                   : p.Pair(k, n));
    }
    if (p.biases > 0) sum += alone.args[4].At<float>(n);
    if (p.has_residual) sum += alone.args[5].At<float>(n);
    ExpectNear(found[n], sum, "a product");
  }
}

void FuzzMatmul() {
  const bool large = draw.OneIn(2000);  // worth a second thread
  Matmul p{};
  p.layout = draw.Below(22);
  p.bytes = draw.Of<int64_t>({0, 1, kTwoTerms});
  p.narrow = draw.OneIn(4);
  p.kind = draw.OneIn(2) ? 0 : draw.Below(8);
  p.gated = draw.OneIn(10) ? draw.Below(2) : p.kind == 7 || (p.kind >= 3 && draw.OneIn(2));
  p.rows = large ? 8 : draw.OneIn(20) ? draw.In(9, 40) : draw.In(0, 4);
  p.outer = large ? 96 : draw.In(1, 36);
  p.inner = large ? 128 : p.IsPlain() || p.IsPerOutput() ? draw.In(1, 36)
            : 32 * draw.In(1, p.IsSuper() ? 9 : 2);
  for (p.supers = draw.In(1, 9); p.inner / 32 % p.supers != 0 && !draw.OneIn(20);) --p.supers;
  p.lines = 1 + (p.inner / 32 / p.supers + 1) / 2 + (draw.OneIn(20) ? draw.In(-1, 1) : 0);
  if (p.IsPlain() && !draw.OneIn(20)) p.bytes = 0;
  p.selected = draw.Of<int64_t>({0, 1, p.rows, p.rows});
  p.stack = p.selected == 0 ? 1 : draw.In(1, 3);
  p.biases = draw.OneIn(2) ? 0 : draw.OneIn(2) ? 1 : p.stack;
  p.norms = draw.OneIn(2) ? 1 : p.stack;
  p.has_residual = p.selected <= 1 && p.rows > 0 && draw.OneIn(2);
  const bool normed = p.kind == 1 || p.kind == 2;
  const int64_t norm = normed ? p.norms * p.inner : 0;
  using Dims = std::vector<int64_t>;
  Call call{rooflax_matmul, {}, {}, p.Attributes()};
  call.args.emplace_back(kF32, Dims{p.rows, p.inner * (p.gated ? 2 : 1)});
  call.args.emplace_back(p.IsOfPairs() ? kBf16 : p.IsPlain() ? draw.Of({kF32, kBf16}) : p.layout == 3 ? kU8 : draw.Of({kS8, kU8}),
                         p.Weight(p.selected > 0));
  call.args.emplace_back(p.ScaleType(), p.Scales(p.stack));
  call.args.emplace_back(kS32, Dims{p.stack * p.Sums()});
  call.args.emplace_back(kF32, Dims{p.biases * p.outer});
  call.args.emplace_back(kF32, p.has_residual ? Dims{p.rows, p.outer} : Dims{0});
  call.args.emplace_back(kF32, Dims{norm});
  call.args.emplace_back(kF32, Dims{p.kind == 2 ? norm : 0});
  call.args.emplace_back(kS32, Dims{p.selected});
  RealRows real = DrawRealRows(p.rows);
  call.args.push_back(std::move(real.array));
  call.rets.emplace_back(kF32, Dims{p.rows, p.outer});
  if (call.Mutate()) return call.RunMutated(3);
  for (size_t i = 0; i < 8; ++i) call.args[i].Fill();
  for (int64_t i = 0; i < call.args[3].Count(); ++i) {  // sums of bytes
    call.args[3].At<int32_t>(i) = static_cast<int32_t>(draw.In(-1000, 1000));
  }
  if (p.layout == 6) {
    for (int64_t i = 0; i < call.args[2].Count(); ++i) call.args[2].At<uint8_t>(i) &= 0x7F;  // finite sums
  }
  if (p.layout == 3 || p.layout == 18) {
    for (int64_t i = 0; i < call.args[1].Count(); ++i) call.args[1].At<uint8_t>(i) &= 0xBF;
  }
  p.is_hostile = !p.IsPlain() && draw.OneIn(4);
  for (size_t i = 0; p.is_hostile && i < call.args[2].Bytes(); ++i) {  // infinity, NaN and what is denormal
    if (draw.OneIn(3)) call.args[2].At<uint8_t>(static_cast<int64_t>(i)) = draw.Of<uint8_t>({0, 0x7C, 0x7F, 0xFF, 0x80, 1});
  }
  FillIndices(call.args[8], p.stack, 4);
  bool valid = real.valid && (p.gated ? p.kind >= 3 : p.kind != 7);
  valid &= p.ScalesFit() && (p.bytes == 0 || !(p.IsPlain() || p.layout == 3 || p.HasFloatScales()));
  valid &= p.bytes != kTwoTerms || !p.IsPerOutput();
  valid &= AllBelow(call.args[8], p.selected == 1 ? 1 : p.selected == 0 || !real.valid ? 0 : real.rows, p.stack);
  if (!call.RunExpecting(valid)) return;
  Expect(IsUntouched(call.rets[0], real.rows * p.outer, p.rows * p.outer), "padding was written");
  if (real.rows > 0) CheckMatmulRow(call, p, draw.Below(real.rows));
}

// Packed weights as numbers: a product with a row that is 1 in one place and 0 elsewhere finds the same.
void FuzzNumbers() {
  Matmul p{};
  p.layout = draw.OneIn(10) ? draw.Below(22) : draw.In(2, 20);
  p.rows = 1;
  p.outer = draw.OneIn(50) ? draw.In(100, 400) : draw.In(1, 36);
  p.inner = p.IsPlain() || p.IsPerOutput() ? draw.In(1, 36) : 32 * draw.In(1, p.IsSuper() ? 9 : 2);
  for (p.supers = draw.In(1, 9); p.inner / 32 % p.supers != 0 && !draw.OneIn(20);) --p.supers;
  p.lines = 1 + (p.inner / 32 / p.supers + 1) / 2 + (draw.OneIn(20) ? draw.In(-1, 1) : 0);
  p.selected = draw.In(0, 1);
  p.stack = p.selected == 0 ? 1 : draw.In(1, 3);
  using Dims = std::vector<int64_t>;
  Call call{rooflax_numbers, {}, {}, {Whole("layout", p.layout)}};
  call.args.emplace_back(p.IsOfPairs() ? kBf16 : p.IsPlain() ? kF32 : kU8, p.Weight(p.selected > 0));
  call.args.emplace_back(p.ScaleType(), p.Scales(p.stack));
  call.args.emplace_back(kS32, Dims{p.stack * p.Sums()});
  call.args.emplace_back(kS32, Dims{p.selected});
  call.args.emplace_back(kF32, Dims{draw.In(0, 2)});
  call.rets.emplace_back(kF32, Dims{p.inner, p.outer});
  if (call.Mutate()) return call.RunMutated();
  for (size_t i : {0, 1, 2, 4}) call.args[i].Fill();
  FillIndices(call.args[3], p.stack, 4);
  const bool valid = !p.IsPlain() && p.ScalesFit() && AllBelow(call.args[3], p.selected, p.stack);
  if (!call.RunExpecting(valid)) return;
  const int64_t at = draw.Below(p.inner), member = p.selected == 0 ? 0 : call.args[3].At<int32_t>(0);
  Call alone{rooflax_matmul, {}, {}, p.Attributes()};
  alone.args.emplace_back(kF32, Dims{1, p.inner});
  alone.args.push_back(call.args[0].Part(p.stack, member, p.Weight(false)));
  alone.args.push_back(call.args[1].Part(p.stack, member, p.Scales(1)));
  alone.args.push_back(call.args[2].Part(p.stack, member, {p.Sums()}));
  for (Type type : {kF32, kF32, kF32, kF32, kS32, kS32}) alone.args.emplace_back(type, Dims{0});
  for (size_t i : {0, 4, 5, 6, 7, 8, 9}) alone.args[i].Allocate();
  for (int64_t k = 0; k < p.inner; ++k) alone.args[0].At<float>(k) = k == at ? 1.0f : 0.0f;
  alone.rets.emplace_back(kF32, Dims{1, p.outer});
  const std::string why = alone.Run();
  if (!why.empty()) Fail("a row was rejected: " + why);
  for (int64_t n = 0; n < p.outer; ++n) {
    const float found = call.rets[0].At<float>(at * p.outer + n), product = alone.rets[0].At<float>(n);
    if (std::isfinite(product)) ExpectNear(found, product, "a number");  // no other weight of the output is NaN
  }
}

// Rows of several adapters: each is what it is alone, and one without is left alone.
void FuzzAdapters() {
  const bool large = draw.OneIn(500);  // worth a second thread
  const int64_t kind = draw.OneIn(2) ? 0 : draw.Below(8);
  const bool gated = draw.OneIn(10) ? draw.OneIn(2) : kind == 7 || (kind >= 3 && draw.OneIn(2));
  const int64_t rows = large ? 70 : draw.In(0, 12), inner = large ? 150 : draw.In(1, 20);
  const int64_t rank = draw.OneIn(8) ? draw.In(0, 40) : draw.In(1, 6), parts = draw.In(1, 3);
  const int64_t width = (rank * parts + 15) / 16 * 16, num_slots = draw.In(1, 3);
  const bool stacked = draw.OneIn(2);
  const int64_t stack = stacked ? draw.In(1, 3) : 1, norms = draw.OneIn(2) ? 1 : stack;
  using Dims = std::vector<int64_t>;
  std::vector<int32_t> spans;
  int64_t outer = draw.In(0, 3), panels = 0;
  bool valid = true;
  for (int64_t i = draw.In(0, 3); i > 0; --i) {
    const int64_t outputs = draw.In(1, 40);
    for (int64_t number : {outer, outputs, draw.Below(parts)}) spans.push_back(static_cast<int32_t>(number));
    outer += outputs + draw.In(0, 3);
    panels += (outputs + 15) / 16;
  }
  const bool strange = !spans.empty() && draw.OneIn(8);
  if (strange) spans[static_cast<size_t>(draw.Below(static_cast<int64_t>(spans.size())))] = draw.Strange(outer);
  const bool normed = kind == 1 || kind == 2;
  const Type weights = draw.Of({kF32, kBf16});
  const std::vector<Attribute> attributes{Real("alpha", 1.7f), Whole("before", kind), Real("eps", 1e-3f),
                                          Whole("gated", gated), Real("limit", 5.0f)};
  Call call{rooflax_adapters, {}, {}, attributes};
  const auto of = [&](Dims dims) {
    if (stacked) dims.insert(dims.begin(), stack);
    return dims;
  };
  call.args.emplace_back(draw.Of({kF32, kBf16}), Dims{rows, inner * (gated ? 2 : 1)});
  call.args.emplace_back(draw.Of({kF32, kBf16}), Dims{rows, outer});
  call.args.emplace_back(kF32, Dims{normed ? norms * inner : 0});
  call.args.emplace_back(kF32, Dims{kind == 2 ? norms * inner : 0});
  call.args.emplace_back(weights, of({num_slots, inner, width}));
  call.args.emplace_back(weights, of({num_slots, panels, rank, 16}));
  call.args.emplace_back(kS32, Dims{static_cast<int64_t>(spans.size()) / 3, 3});
  call.args.emplace_back(kS32, Dims{rows});
  call.args.emplace_back(kS32, Dims{stacked ? 1 : 0});
  RealRows real = DrawRealRows(rows);
  call.args.push_back(std::move(real.array));
  call.rets.emplace_back(call.args[1].type, call.args[1].dims);
  if (call.Mutate()) return call.RunMutated();
  for (size_t i = 0; i < 6; ++i) call.args[i].Fill();
  Array &numbers = call.args[6], &slots = call.args[7], &index = call.args[8];
  numbers.Allocate();
  std::copy(spans.begin(), spans.end(), numbers.As<int32_t>());
  FillIndices(slots, num_slots + 1, 8);
  FillIndices(index, stack, 8);
  int64_t end = 0, found = 0;
  for (size_t i = 0; i < spans.size(); i += 3) {
    const int64_t first = spans[i], outputs = spans[i + 1], part = spans[i + 2];
    valid &= first >= end && outputs >= 1 && first + outputs <= outer && part >= 0 && (part + 1) * rank <= width;
    end = first + outputs;
    found += (outputs + 15) / 16;
  }
  valid &= found == panels && real.valid && (gated ? kind >= 3 : kind != 7);
  valid = valid && AllBelow(slots, real.rows, num_slots + 1) && AllBelow(index, index.Count(), stack);
  if (!call.RunExpecting(valid) || rows == 0) return;
  const int64_t row = draw.Below(rows), slot = slots.At<int32_t>(row), item = SizeOf(call.rets[0].type) * outer;
  const char *y = call.args[1].As<char>() + row * item, *changed = call.rets[0].As<char>() + row * item;
  if (row >= real.rows || slot == 0) return Expect(std::memcmp(y, changed, static_cast<size_t>(item)) == 0, "a row without");
  Call alone{rooflax_adapters, {}, {}, attributes};
  for (size_t i = 0; i < 9; ++i) {
    const bool of_row = i < 2 || i == 7;
    Dims dims = call.args[i].dims;
    if (of_row) dims[0] = 1;
    alone.args.push_back(of_row ? call.args[i].Part(rows, row, dims) : call.args[i].Part(1, 0, dims));
  }
  alone.args.emplace_back(kS32, Dims{0});
  alone.args.back().Allocate();
  alone.rets.emplace_back(call.rets[0].type, Dims{1, outer});
  Expect(alone.Run().empty(), "a row alone was rejected");
  Expect(std::memcmp(alone.rets[0].As<char>(), changed, static_cast<size_t>(item)) == 0, "a row among others");
  if (kind != 0 || call.rets[0].type != kF32) return;
  const int64_t member = stacked ? index.At<int32_t>(0) : 0, own = member * num_slots + slot - 1;
  int64_t panel = own * panels;
  for (size_t i = 0; i < spans.size(); i += 3) {
    for (int64_t n = 0; n < spans[i + 1]; ++n) {
      double sum = call.args[1].At<float>(row * outer + spans[i] + n);
      for (int64_t r = 0; r < rank; ++r) {
        double few = 0;
        for (int64_t k = 0; k < inner; ++k) {
          few += static_cast<double>(Decode(call.args[0], row * inner + k)) *
                 Decode(call.args[4], (own * inner + k) * width + spans[i + 2] * rank + r);
        }
        sum += few * Decode(call.args[5], ((panel + n / 16) * rank + r) * 16 + n % 16);
      }
      ExpectNear(call.rets[0].At<float>(row * outer + spans[i] + n), sum, "an adapter");
    }
    panel += (spans[i + 1] + 15) / 16;
  }
}

// Of a type of GGUF's blocks: bytes and groups of a block, bits of a code, bytes of a group's scale or 0.
struct Blocks {
  const char* name;
  int64_t bytes, groups, bits, scale;
};
constexpr Blocks kBlocks[] = {
    {"Q8_0", 34, 1, 8, 2}, {"Q4_0", 18, 1, 4, 2}, {"IQ4_NL", 18, 1, 4, 2}, {"MXFP4", 17, 1, 4, 1},
    {"Q4_1", 20, 1, 4, 4}, {"Q5_0", 22, 1, 5, 2}, {"Q5_1", 24, 1, 5, 4},   {"Q2_K", 84, 8, 2, 0},
    {"Q3_K", 110, 8, 3, 0}, {"Q4_K", 144, 8, 4, 0}, {"Q5_K", 176, 8, 5, 0}, {"Q6_K", 210, 8, 6, 0},
    {"IQ4_XS", 136, 8, 4, 0}};

// Rows of any bytes: each is packed as it is alone, in its lane, and nothing beside it is written.
void FuzzPackBlocks() {
  const Blocks& type = kBlocks[draw.Below(static_cast<int64_t>(std::size(kBlocks)))];
  const char* name = draw.OneIn(20) ? draw.Of({"", "F32", "Q4_K_M", "IQ2_XS"}) : type.name;
  const int64_t num_rows = draw.In(1, 40), groups = type.groups * draw.In(0, 3) + (draw.OneIn(20) ? draw.Below(8) : 0);
  const int64_t panels = (num_rows + 15) / 16, supers = groups / 8;
  std::vector<Array> rows;
  std::vector<uint64_t> addresses;
  for (int64_t i = 0; i < num_rows; ++i) {
    rows.emplace_back(kU8, std::vector<int64_t>{groups / type.groups * type.bytes});
    rows.back().Fill();
    addresses.push_back(reinterpret_cast<uint64_t>(rows.back().As<char>()));
  }
  const int64_t lane_bytes = type.scale == 0 ? 4 : type.scale;
  const auto arrays = [&](int64_t count) {
    std::vector<Array> found;
    found.emplace_back(kU8, std::vector<int64_t>{count * groups * type.bits, 16, 4});
    found.emplace_back(kU8, std::vector<int64_t>{count * (type.scale == 0 ? supers * 5 : groups), 16, lane_bytes});
    for (auto& array : found) {
      array.Allocate();
      std::memset(array.As<char>(), kUntouched, array.Bytes());
    }
    return found;
  };
  const auto packed = arrays(panels);
  const auto pack = [&](const std::vector<Array>& out, const uint64_t* from, int64_t count) {
    const int threads = static_cast<int>(draw.In(-1, 4));
    return rooflax_pack_blocks(name, from, count, groups, out[0].As<uint8_t>(), out[1].As<uint8_t>(), threads);
  };
  const bool valid = name == type.name && groups % type.groups == 0;
  Expect(pack(packed, addresses.data(), num_rows) == valid, "a type or a number of groups");
  ++(valid ? computed : rejected);
  const int64_t row = draw.Below(panels * 16);
  const auto alone = arrays(1);
  if (valid && row < num_rows) pack(alone, &addresses[static_cast<size_t>(row)], 1);
  for (size_t i = 0; i < 2; ++i) {
    const int64_t each = packed[i].dims[2], lines = alone[i].dims[0];
    for (int64_t line = 0; line < lines; ++line) {
      const char* found = packed[i].As<char>() + ((row / 16 * lines + line) * 16 + row % 16) * each;
      const char* wanted = alone[i].As<char>() + line * 16 * each;
      Expect(std::memcmp(found, wanted, static_cast<size_t>(each)) == 0, "a row among others");
    }
  }
}

// Groups of any numbers: each is encoded as it is alone, and nothing beside them is written.
void FuzzEncode() {
  const auto encoder = draw.OneIn(2) ? rooflax_encode_iq4 : rooflax_encode_int6;
  const int64_t groups = draw.In(0, 40);
  Array rows(kF32, {groups, 32});
  rows.Fill();
  for (int64_t i = draw.Below(4); groups > 0 && i > 0; --i) {  // any bits: NaN, infinite, denormal
    rows.At<uint32_t>(draw.Below(rows.Count())) = static_cast<uint32_t>(draw.Next());
  }
  const auto arrays = [](int64_t count) {
    std::vector<Array> found;
    found.emplace_back(kU8, std::vector<int64_t>{count, 32});
    for (int i = 0; i < 2; ++i) found.emplace_back(kF32, std::vector<int64_t>{count});
    for (auto& array : found) array.Allocate();
    return found;
  };
  const auto encode = [encoder](const float* from, int64_t count, const std::vector<Array>& out) {
    const int threads = static_cast<int>(draw.In(-1, 4));
    encoder(from, count, out[0].As<uint8_t>(), out[1].As<float>(), out[2].As<float>(), threads);
  };
  const auto all = arrays(groups), alone = arrays(1);
  encode(rows.As<float>(), groups, all);
  ++computed;
  if (groups == 0) return;
  const int64_t one = draw.Below(groups);
  encode(rows.As<float>() + one * 32, 1, alone);
  for (size_t i = 0; i < 3; ++i) {
    const size_t each = i == 0 ? 32 : 4;
    const char* found = all[i].As<char>() + static_cast<size_t>(one) * each;
    Expect(std::memcmp(found, alone[i].As<char>(), each) == 0, "a group among others");
  }
}

void CheckMetadata(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{
      {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata, nullptr}, &metadata};
  XLA_FFI_CallFrame frame = NewFrame();
  frame.extension_start = &extension.extension_base;
  Expect(handler(&frame) == nullptr && metadata.api_version.minor_version == XLA_FFI_API_MINOR, "metadata");
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t draws = argc > 1 ? std::atoll(argv[1]) : 2000;
  const char* only = argc > 2 ? argv[2] : nullptr;
  const struct {
    const char* name;
    XLA_FFI_Handler* handler;
    void (*fuzz)();
  } handlers[] = {{"rooflax_matmul", rooflax_matmul, FuzzMatmul},
                  {"rooflax_numbers", rooflax_numbers, FuzzNumbers},
                  {"rooflax_adapters", rooflax_adapters, FuzzAdapters},
                  {"rooflax_attention", rooflax_attention, FuzzAttention},
                  {"rooflax_rows", rooflax_rows, FuzzRows},
                  {"rooflax_matmul_transposed", rooflax_matmul_transposed, FuzzTransposed},
                  {"rooflax_argmax", rooflax_argmax, FuzzArgmax},
                  {"rooflax_sample", rooflax_sample, FuzzSample},
                  {"rooflax_cache_write", rooflax_cache_write, FuzzCacheWrite},
                  {"rooflax_norm", rooflax_norm, FuzzNorm},
                  {"rooflax_delta_rule", rooflax_delta_rule, FuzzDeltaRule},
                  {"rooflax_causal_conv", rooflax_causal_conv, FuzzCausalConv},
                  {"rooflax_whole_attention", rooflax_whole_attention, FuzzWhole},
                  {"rooflax_whole_attention_gradients", rooflax_whole_attention_gradients, FuzzWholeGradients},
                  {"rooflax_pack_blocks", nullptr, FuzzPackBlocks},
                  {"rooflax_encode", nullptr, FuzzEncode}};
  for (const char* name : {"generic", "avx2", "avx2-vnni", "avx512", "avx512-far", "avx512-bf16", "amx"}) {
    if (only != nullptr && std::strcmp(name, only) != 0) continue;
    if (!rooflax_force_instruction_set(name)) {
      std::printf("%s: this processor has none\n", name);
      continue;
    }
    for (const auto& one : handlers) {
      if (one.handler == nullptr && std::strcmp(name, "generic") != 0) continue;  // whatever the instruction set
      handler_name = one.name;
      rejected = computed = 0;
      if (one.handler != nullptr) CheckMetadata(one.handler);
      const auto start = std::chrono::steady_clock::now();
      for (draw_number = 0; draw_number < draws; ++draw_number) {
        draw.state = static_cast<uint64_t>(draw_number) << 8;
        one.fuzz();
      }
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      std::printf("%s, %s: %lld computed, %lld rejected, %.1f s\n", name, one.name,
                  static_cast<long long>(computed), static_cast<long long>(rejected), seconds.count());
      std::fflush(stdout);
    }
  }
  return 0;
}
