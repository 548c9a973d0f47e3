// Attention over the paged cache as an XLA custom call.

#include <algorithm>
#include <vector>

#include "ffi_common.h"
#include "kernels.h"
#include "parallel.h"

namespace rooflax {
namespace {

using S32 = ffi::Buffer<ffi::S32>;

// A list of tokens: sequence r's queries are `query_lens[r]` of them from `query_starts[r]` on, the first
// at position `positions[r]`. A query sees `ahead` tokens behind itself; 0 is causal.
struct Inputs {
  ffi::AnyBuffer q;  // [T, N, H], float32 or bfloat16, as is what comes out
  ffi::AnyBuffer k, v;  // pools [blocks, K, block_size, H]
  F32 k_scale, v_scale;  // of pools of bytes, [blocks, K, block_size]; else empty
  S32 tables;  // [R, nb]
  S32 first_positions, query_starts, query_lens, positions, context_lens;  // [R]
  F32 sinks;  // [N] or empty
  F32 bias;  // [N, 2 * reach + 1] by the key's position less the query's, from -reach on; or empty
};

struct Sizes {
  int64_t tokens, heads, head_dim, rows, kv_heads, block_size, blocks_per_row, num_blocks, group,
      window, ahead;
  Width width;
  bool halves;  // whether queries are bfloat16
  float scale, cap;  // of scores

  int64_t slots() const { return blocks_per_row * block_size; }
  int64_t item() const { return width == Width::kFloat32 ? 4 : IsBytes(width) ? 1 : 2; }
};

bool ScalesFit(const F32& scale, const ffi::AnyBuffer& pool, Width width) {
  if (!IsBytes(width)) return scale.element_count() == 0;
  return Rank(scale) == 3 && Dim(scale, 0) == Dim(pool, 0) && Dim(scale, 1) == Dim(pool, 1) &&
         Dim(scale, 2) == Dim(pool, 2);
}

constexpr int64_t kFarthest = int64_t{1} << 31;

bool Fits(const Inputs& in, const ffi::AnyBuffer& out, int64_t window, int64_t ahead, Sizes& s) {
  if (Rank(in.q) != 3 || Rank(in.k) != 4 || Rank(in.tables) != 2 || Rank(in.sinks) != 1 ||
      Rank(in.bias) != 2 ||
      !SameShape(in.k, in.v) || !SameShape(in.q, out)) {
    return false;
  }
  s = {Dim(in.q, 0), Dim(in.q, 1), Dim(in.q, 2), Dim(in.tables, 0), Dim(in.k, 1), Dim(in.k, 2),
       Dim(in.tables, 1), Dim(in.k, 0), 0, window, ahead, Width::kFloat32,
       in.q.element_type() == ffi::DataType::BF16, 0, 0};
  if ((!s.halves && in.q.element_type() != ffi::DataType::F32) ||
      out.element_type() != in.q.element_type() || Dim(in.k, 3) != s.head_dim || s.head_dim < 1 || s.kv_heads < 1 || s.block_size < 1 ||
      s.heads % s.kv_heads != 0 || !WidthOf(in.k.element_type(), s.width) ||
      in.v.element_type() != in.k.element_type() || window < 0 || ahead < 0 || ahead > kFarthest) {
    return false;
  }
  for (const S32* of_row : {&in.first_positions, &in.query_starts, &in.query_lens, &in.positions,
                            &in.context_lens}) {
    if (Rank(*of_row) != 1 || Dim(*of_row, 0) != s.rows) return false;
  }
  s.group = s.heads / s.kv_heads;
  return ScalesFit(in.k_scale, in.k, s.width) && ScalesFit(in.v_scale, in.v, s.width) &&
         (in.sinks.element_count() == 0 || Dim(in.sinks, 0) == s.heads) &&
         (in.bias.element_count() == 0 || (Dim(in.bias, 0) == s.heads && Dim(in.bias, 1) % 2 == 1));
}

// One sequence's part of the list, and the slots of its table that its queries see.
struct Row {
  int64_t start, count, position, first_position, context, ahead;

  int64_t Past(int64_t query) const {  // the position behind the last key that it sees
    return std::min(position + query + 1 + ahead, context);
  }
  int64_t Oldest(int64_t query, int64_t window) const {
    const int64_t here = position + query + 1;
    return window > 0 ? std::max(first_position, here - window) : first_position;
  }
};

Row RowOf(const Inputs& in, const Sizes& s, int64_t r) {
  return {in.query_starts.typed_data()[r], in.query_lens.typed_data()[r],
          in.positions.typed_data()[r], in.first_positions.typed_data()[r],
          in.context_lens.typed_data()[r], s.ahead};
}

// What is wrong with a row's numbers, or null. A row without queries reads nothing.
const char* Check(const Inputs& in, const Sizes& s, int64_t r) {
  const Row row = RowOf(in, s, r);
  if (row.count == 0) return nullptr;
  if (row.count < 0 || row.start < 0 || row.start + row.count > s.tokens) {
    return "queries outside the list of tokens";
  }
  if (row.first_position < 0 || row.position < row.first_position) return "a position";
  const int64_t past = row.Past(row.count - 1) - row.first_position;
  if (past > s.slots()) return "a context longer than its block table";
  if (in.bias.element_count() > 0) {  // the first query sees farthest ahead, the last one back
    const int64_t reach = Dim(in.bias, 1) / 2, last = row.count - 1;
    if (row.Past(0) - 1 - row.position > reach ||
        row.position + last - row.Oldest(last, s.window) > reach) {
      return "a distance that has no bias";
    }
  }
  const int64_t oldest = row.Oldest(0, s.window) - row.first_position;
  for (int64_t slot = oldest / s.block_size * s.block_size; slot < past; slot += s.block_size) {
    const int32_t block = in.tables.typed_data()[r * s.blocks_per_row + slot / s.block_size];
    if (block < 0 || block >= s.num_blocks) return "a block outside the pool";
  }
  return nullptr;
}

// Whether queries meet their keys by a kernel that takes bfloat16, whatever their number.
bool ByHalves(const Sizes& s) {
  return ChosenKernels().attend_halves != nullptr && s.halves && s.width == Width::kBfloat16 &&
         s.head_dim % kTermBlock == 0;
}

// Memory of one thread.
struct Scratch {
  std::vector<float> scores, keys, q, out;
  std::vector<uint16_t> halves;
};

// Queries [begin, end) of one row and K/V head; number i is token i / group, head i % group of it.
void AttendTile(const Inputs& in, const Sizes& s, void* out, int64_t r, int64_t kv_head, int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  const Kernels& kernels = ChosenKernels();
  const bool by_halves = ByHalves(s);
  const Row row = RowOf(in, s, r);
  const float *sinks = OrNull(in.sinks), *bias = OrNull(in.bias);
  const int64_t reach = Dim(in.bias, 1) / 2, count = end - begin;
  const auto place = [&](int64_t i) {
    return ((row.start + i / s.group) * s.heads + kv_head * s.group + i % s.group) * s.head_dim;
  };
  if (s.halves) {  // of bfloat16, a tile's queries and outputs are copies
    scratch.out.resize(static_cast<size_t>(count * s.head_dim));
    by_halves ? scratch.halves.resize(scratch.out.size()) : scratch.q.resize(scratch.out.size());
  }
  Query queries[kHalfQueries];
  int64_t low = s.slots(), high = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t query = i / s.group, head = kv_head * s.group + i % s.group;
    // A query whose window begins behind the context sees nothing, and so no slot behind it.
    const int64_t last = std::max<int64_t>(0, row.Past(query) - row.first_position);
    const int64_t first = std::min(last, row.Oldest(query, s.window) - row.first_position);
    const float* own = nullptr;
    if (bias != nullptr && first < last) {
      const int64_t distance = row.first_position + first - (row.position + query);
      own = bias + head * (2 * reach + 1) + reach + distance;
    }
    Query& made = queries[i - begin];
    made = {nullptr, nullptr, first, last, sinks == nullptr ? nullptr : sinks + head, own};
    if (s.halves) {
      const int64_t at = (i - begin) * s.head_dim;
      const auto* q = static_cast<const uint16_t*>(in.q.untyped_data()) + place(i);
      made.out = scratch.out.data() + at;
      if (by_halves) {
        std::copy(q, q + s.head_dim, scratch.halves.data() + at);
      } else {
        made.q = scratch.q.data() + at;
        kernels.widen(q, scratch.q.data() + at, s.head_dim);
      }
    } else {
      made.q = static_cast<const float*>(in.q.untyped_data()) + place(i);
      made.out = static_cast<float*>(out) + place(i);
    }
    low = std::min(low, first);
    high = std::max(high, last);
  }
  int64_t span = std::max<int64_t>(0, high - low);
  if (by_halves && span > 0) span = (high + kSlotBlock - 1) / kSlotBlock * kSlotBlock - low / kSlotBlock * kSlotBlock;
  scratch.scores.resize(static_cast<size_t>((by_halves ? kHalfQueries : kQueries) * span));
  scratch.keys.resize(static_cast<size_t>(s.head_dim * kKeysAtOnce));
  const int64_t at = kv_head * s.block_size;
  AttendArgs args{};
  args.queries = queries;
  args.count = count;
  args.halves = scratch.halves.data();
  args.k = static_cast<const char*>(in.k.untyped_data()) + at * s.head_dim * s.item();
  args.v = static_cast<const char*>(in.v.untyped_data()) + at * s.head_dim * s.item();
  if (IsBytes(s.width)) {
    args.k_scale = in.k_scale.typed_data() + at;
    args.v_scale = in.v_scale.typed_data() + at;
  }
  args.table = in.tables.typed_data() + r * s.blocks_per_row;
  args.scores = scratch.scores.data();
  args.keys = scratch.keys.data();
  args.span = span;
  args.block_stride = s.kv_heads * s.block_size * s.head_dim;
  args.block_size = s.block_size;
  args.head_dim = s.head_dim;
  args.scale = s.scale;
  args.cap = s.cap;
  args.width = s.width;
  (by_halves ? kernels.attend_halves : kernels.attend)(args);
  for (int64_t i = 0; s.halves && i < count; ++i) {
    kernels.narrow(queries[i].out, static_cast<uint16_t*>(out) + place(begin + i), s.head_dim, Width::kBfloat16);
  }
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, F32 k_scale,
                     F32 v_scale, S32 tables, S32 first_positions, S32 query_starts, S32 query_lens,
                     S32 positions, S32 context_lens, F32 sinks, F32 bias, ffi::Result<ffi::AnyBuffer> out,
                     float scale, float cap, int64_t window, int64_t ahead) {
  const Inputs in{q, k, v, k_scale, v_scale, tables, first_positions, query_starts, query_lens,
                  positions, context_lens, sinks, bias};
  Sizes s;
  if (!Fits(in, *out, window, ahead, s)) return Reject("attention: shapes or types");
  s.scale = scale;
  s.cap = cap;
  static thread_local std::vector<int64_t> first_tile;  // of each row
  first_tile.assign(1, 0);
  const int64_t most = ByHalves(s) ? kHalfQueries : kQueries;
  int64_t work = 0, queries = 0;
  for (int64_t r = 0; r < s.rows; ++r) {
    if (const char* why = Check(in, s, r)) {
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("rooflax attention: ") + why);
    }
    const Row row = RowOf(in, s, r);
    first_tile.push_back(first_tile.back() + (row.count * s.group + most - 1) / most);
    if (row.count > 0) {
      work += row.count * std::max<int64_t>(0, row.Past(row.count - 1) - row.first_position);
    }
    queries += row.count;
  }
  TheComputed().attention_queries.fetch_add(queries, std::memory_order_relaxed);
  const std::vector<int64_t>& tiles = first_tile;
  const int64_t items = tiles.back() * s.kv_heads;
  const int64_t threads = ThreadsFor(pool, work * s.heads * s.head_dim);
  const int64_t piece = std::max<int64_t>(1, items / (threads * 16));
  ParallelFor(
      (items + piece - 1) / piece, threads, [&](auto task) { pool.Schedule(std::move(task)); },
      [&](int64_t number) {
        for (int64_t i = number * piece; i < std::min(items, (number + 1) * piece); ++i) {
          // The tiles of a row's K/V head one after the other, then its next head's.
          const auto above = std::upper_bound(tiles.begin(), tiles.end(), i / s.kv_heads);
          const int64_t r = above - tiles.begin() - 1, count = tiles[r + 1] - tiles[r];
          const int64_t own = i - tiles[r] * s.kv_heads, tile = own % count;
          const int64_t all = in.query_lens.typed_data()[r] * s.group;
          AttendTile(in, s, out->untyped_data(), r, own / count, tile * most,
                     std::min(all, (tile + 1) * most));
        }
      });
  return ffi::Error::Success();
}

}  // namespace

ROOFLAX_HANDLER(rooflax_attention, Attention,
                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
                    .Arg<ffi::AnyBuffer>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Arg<S32>()
                    .Arg<S32>().Arg<S32>().Arg<S32>().Arg<F32>().Arg<F32>()
                    .Ret<ffi::AnyBuffer>().Attr<float>("scale").Attr<float>("cap").Attr<int64_t>("window")
                    .Attr<int64_t>("ahead"));

// Counts changes of what arguments mean; ops/native.py says the one it speaks.
extern "C" __attribute__((visibility("default"))) int rooflax_kernels_version() { return 26; }

Computed& TheComputed() {
  static Computed computed;
  return computed;
}

// Rows of matmuls, queries of attention, tokens written to caches and rows sampled, since the start.
extern "C" __attribute__((visibility("default"))) void rooflax_computed(int64_t* counts) {
  const Computed& computed = TheComputed();
  counts[0] = computed.matmul_rows.load();
  counts[1] = computed.attention_queries.load();
  counts[2] = computed.cache_tokens.load();
  counts[3] = computed.sampled_rows.load();
}

extern "C" __attribute__((visibility("default"))) int rooflax_ffi_version() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}

}  // namespace rooflax
