// Which instruction set the kernels use: the processor's best, or the one a test forces.

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "kernels.h"

#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#if defined(__x86_64__) && !defined(ROOFLAX_GENERIC_ONLY)
#define ROOFLAX_X86
#elif defined(__aarch64__) && !defined(ROOFLAX_GENERIC_ONLY)
#define ROOFLAX_NEON
#endif

namespace rooflax {
namespace {

#if defined(ROOFLAX_X86)
bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#if defined(ROOFLAX_WITHOUT_VNNI)  // GCC 10 knows neither the instructions nor their name
#elif defined(ROOFLAX_VNNI_IN_PAIRS)
bool HasVnni() { return HasAvx2(); }
#else
bool HasVnni() { return HasAvx2() && __builtin_cpu_supports("avxvnni"); }
#endif

#if defined(ROOFLAX_AVX512_IN_LANES)
bool HasAvx512() { return HasAvx2(); }
#else
bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

#elif defined(ROOFLAX_NEON)
#if defined(__linux__)
bool HasDotProducts() { return (getauxval(AT_HWCAP) & 1ul << 20) != 0; }  // HWCAP_ASIMDDP
bool HasMatrices() { return HasDotProducts() && (getauxval(AT_HWCAP2) & 1ul << 13) != 0; }  // HWCAP2_I8MM
#elif defined(__APPLE__)
bool Has(const char* feature) {
  int is = 0;
  size_t size = sizeof(is);
  return sysctlbyname(feature, &is, &size, nullptr, 0) == 0 && is != 0;
}
bool HasDotProducts() { return Has("hw.optional.arm.FEAT_DotProd"); }
bool HasMatrices() { return HasDotProducts() && Has("hw.optional.arm.FEAT_I8MM"); }
#else
bool HasDotProducts() { return false; }
bool HasMatrices() { return false; }
#endif
#endif

}  // namespace

#if defined(ROOFLAX_X86)
namespace {

#if defined(ROOFLAX_DOTS_IN_LANES)
bool HasDots() { return HasAvx512(); }
#else
bool HasDots() { return HasAvx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

const Kernels& WithDots() {
  static const Kernels kernels = [] {
    Kernels made = __builtin_cpu_is("amd") ? avx512_far::kKernels : avx512::kKernels;
    made.name = "avx512-bf16";
    made.split = avx512_bf16::kPairs.split;
    made.pairs = avx512_bf16::kPairs.pairs;
    return made;
  }();
  return kernels;
}

}  // namespace
#endif

// A process has to ask the operating system for them, once.
bool HasTiles() {
#if !defined(ROOFLAX_X86) || defined(ROOFLAX_WITHOUT_TILES)
  return false;
#elif defined(ROOFLAX_TILES_IN_MEMORY)
  return HasAvx512();
#elif defined(__linux__)
  static const bool allowed = [] {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return HasAvx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
           __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return allowed;
#else
  return false;
#endif
}

namespace {

#if defined(ROOFLAX_X86) && !defined(ROOFLAX_WITHOUT_VNNI)
const Kernels& WithVnni() {
  static const Kernels kernels = [] {
    Kernels made = avx2::kKernels;
    made.name = "avx2-vnni";
    made.row_offset = avx2_vnni::kBytes.row_offset;
    made.quantize_row = avx2_vnni::kBytes.quantize_row;
    made.quantize_groups = avx2_vnni::kBytes.quantize_groups;
    made.bytes = avx2_vnni::kBytes.bytes;
    return made;
  }();
  return kernels;
}
#endif

#if defined(ROOFLAX_X86) && !defined(ROOFLAX_WITHOUT_TILES)
const Kernels& WithTiles() {
  static const Kernels kernels = [] {
    Kernels made = avx512_far::kKernels;
    made.name = "amx";
    made.tiled = true;
    made.split = amx::kTiles.split;
    made.pairs = amx::kTiles.pairs;
    made.unembed = amx::kTiles.unembed;
    made.bytes = amx::kTiles.bytes;
    made.attend_halves = amx::kTiles.attend_halves;
    return made;
  }();
  return kernels;
}
#endif

}  // namespace

const Kernels* FindKernels(const char* name) {
#if defined(ROOFLAX_X86)
#if !defined(ROOFLAX_WITHOUT_TILES)
  if (std::strcmp(name, "amx") == 0) return HasTiles() ? &WithTiles() : nullptr;
#endif
  if (std::strcmp(name, "avx512-bf16") == 0) return HasDots() ? &WithDots() : nullptr;
  if (std::strcmp(name, "avx512-far") == 0) return HasAvx512() ? &avx512_far::kKernels : nullptr;
  if (std::strcmp(name, "avx512") == 0) return HasAvx512() ? &avx512::kKernels : nullptr;
#if !defined(ROOFLAX_WITHOUT_VNNI)
  if (std::strcmp(name, "avx2-vnni") == 0) return HasVnni() ? &WithVnni() : nullptr;
#endif
  if (std::strcmp(name, "avx2") == 0) return HasAvx2() ? &avx2::kKernels : nullptr;
#elif defined(ROOFLAX_NEON)
#if !defined(ROOFLAX_WITHOUT_I8MM)
  if (std::strcmp(name, "neon-i8mm") == 0) return HasMatrices() ? &neon_i8mm::kKernels : nullptr;
#endif
#if !defined(ROOFLAX_WITHOUT_DOTPROD)
  if (std::strcmp(name, "neon-dotprod") == 0) return HasDotProducts() ? &neon_dotprod::kKernels : nullptr;
#endif
#endif
  return std::strcmp(name, "generic") == 0 ? &generic::kKernels : nullptr;
}

namespace {

const Kernels* Best() {
#if defined(ROOFLAX_X86)
  for (const char* name : {"amx", "avx512-bf16"}) {
    if (const Kernels* found = FindKernels(name)) return found;
  }
  if (const Kernels* found = __builtin_cpu_is("amd") ? FindKernels("avx512-far") : nullptr) return found;
#endif
  for (const char* name : {"avx512", "avx2-vnni", "avx2", "neon-i8mm", "neon-dotprod"}) {
    if (const Kernels* found = FindKernels(name)) return found;
  }
  return &generic::kKernels;
}

std::atomic<const Kernels*> forced{nullptr};

}  // namespace

const Kernels& DefaultKernels() {
  static const Kernels* const best = Best();
  return *best;
}

const Kernels* ForcedKernels() { return forced.load(std::memory_order_relaxed); }

const Kernels& ChosenKernels() {
  const Kernels* kernels = ForcedKernels();
  return kernels != nullptr ? *kernels : DefaultKernels();
}

}  // namespace rooflax

extern "C" {

// The name of the instruction set in use.
__attribute__((visibility("default"))) const char* rooflax_instruction_set() {
  return rooflax::ChosenKernels().name;
}

// Forces "generic", "avx2", "avx2-vnni", "avx512", "avx512-far", "avx512-bf16", "amx", "neon-dotprod" or
// "neon-i8mm" for all work, whatever was measured; 0 if this processor lacks it. "" ends that.
__attribute__((visibility("default"))) int rooflax_force_instruction_set(const char* name) {
  const rooflax::Kernels* found = *name ? rooflax::FindKernels(name) : nullptr;
  if (found == nullptr && *name) return 0;
  rooflax::forced.store(found, std::memory_order_relaxed);
  return 1;
}

}  // extern "C"
