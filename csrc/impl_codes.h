// Matmuls of packed weights by their code. Part of kernels_impl.h.

#if !defined(ROOFLAX_VNNI)
// A group's weights in float32.
template <typename Type>
void WidenBlock(const PackedArgs& a, int64_t block, const uint8_t* from, F16* w) {
  const int64_t groups = a.stride / kGroup;
  const auto factors = Type::Scales::Of(a, block / groups, block % groups);
  ROOFLAX_WHOLE
  for (int64_t q = 0; q < 8; ++q) {
    const I16 codes = Type::Codes::Unsigned(from, q);
    const int64_t part = q / Type::kQuads;
    for (int64_t j = 0; j < 4; ++j) {
      const I16 code = ((codes >> static_cast<int32_t>(8 * j)) & 0xff) - static_cast<int32_t>(Type::Codes::kZero);
      F16 value = ToFloat(code) * factors.scale[part];
      if constexpr (Type::Scales::kHasMinimum) value -= factors.minimum[part];
      w[q * 4 + j] = value;
    }
  }
}

// For `WideTile`: any type, by its code, so that one matmul is compiled for all of them.
struct BlockWide {
  static constexpr bool kGrouped = true;
  static int64_t Bytes(const PackedArgs& a) { return TraitsOf(a.code).bits * 64; }
  static void Widen(const PackedArgs& a, int64_t block, const uint8_t* from, int64_t, F16* w) {
    WithBlockType(a.code, [&](auto type) { WidenBlock<decltype(type)>(a, block, from, w); });
  }
};

// Activations in float32: sums in the order of k, whatever the number of rows.
template <>
void PackedCode<BlockWide>(const PackedArgs& a) {
  if (a.rows > 1) return WideMany<BlockWide>(a);
  for (int64_t panel = a.begin; panel < a.end; ++panel) WideTile<BlockWide>::Run<1, 1>(a, 0, panel, 1, Further{});
}
#endif

void Bytes(const PackedArgs& a) {
  switch (a.code) {
#if defined(__aarch64__)
    case Code::kInt8: return RowsTimesBytes(a);
    case Code::kInt8Groups: return GroupsTimesBytes<AsBlocks<Int8Group, Code::kInt8Groups>>(a);
    case Code::kInt4: return GroupsTimesBytes<AsBlocks<Int4Group, Code::kInt4>>(a);
    case Code::kMxfp4: return GroupsTimesBytes<AsBlocks<Mxfp4Group, Code::kMxfp4>>(a);
    default: return WithBlockType(a.code, [&](auto type) { GroupsTimesBytes<decltype(type)>(a); });
#else
    case Code::kInt8: return AllRows<Int8Tile>(a);
    case Code::kInt8Groups: return AllRows<GroupTile<Int8Group>>(a);
    case Code::kInt4: return AllRows<GroupTile<Int4Group>>(a);
    case Code::kMxfp4: return AllRows<GroupTile<Mxfp4Group>>(a);
#if !defined(ROOFLAX_PAIRS_OF_BYTES)
    case Code::kIq4Nl: return AllRows<GroupTile<Iq4Group>>(a);
#endif
    default: return WithBlockType(a.code, [&](auto type) { BlocksTimesBytes<decltype(type)>(a); });
#endif
  }
}

#if !defined(ROOFLAX_VNNI)
// What `use` makes of what widens a code.
template <typename Use>
void WithWide(Code code, Use use) {
  switch (code) {
    case Code::kInt8: return use(ByteWide<Int8Byte>{});
    case Code::kFp8: return use(ByteWide<Fp8Byte>{});
    case Code::kInt8Groups: return use(Int8GroupWide{});
    case Code::kInt4: return use(NibbleWide<Int4Group>{});
    case Code::kMxfp4: return use(NibbleWide<Mxfp4Group>{});
    case Code::kFp8Groups: return use(Fp8GroupWide{});
    case Code::kNf4: return use(FloatNibbleWide<Nf4>{});
    case Code::kNvfp4: return use(FloatNibbleWide<Nvfp4>{});
    default: return use(BlockWide{});
  }
}

void Packed(const PackedArgs& a) {
  WithWide(a.code, [&](auto wide) { PackedCode<decltype(wide)>(a); });
}

void Numbers(const PackedArgs& a) {
  WithWide(a.code, [&](auto wide) { NumbersOf<decltype(wide)>(a); });
}
#endif
