#!/usr/bin/env bash
# Builds csrc/test_kernels.cc with the address, undefined behaviour and thread sanitizers; runs it, each
# instruction set in a process.
# Which instructions compute makes no difference to threads: of those the generic kernels are enough.
# Without optimisation, which would leave out some of what is wrong, and takes five times as long.
# A processor without AVX-512 runs that code too, lane after lane (tools/avx512_in_lanes.h).
# AVX-VNNI's product of bytes is two of AVX2's (csrc/impl_vectors.h).
# AVX512-BF16's product of pairs is two of float32 (csrc/impl_dots.h).
# Tiles of AMX are arrays (csrc/tiles.h): sanitizers see what is read into them.
# Undefined behaviour is an illegal instruction, whose place the address sanitizer says: without reports of its
# own the objects compile a quarter faster.
# The objects with the address sanitizer stay in build/sanitizers, for tools/fuzz.sh.
#   tools/sanitize.sh [compiler]
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${1:-c++}
flags="-std=c++17 -O0 -g -ffp-contract=fast -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized"
out=build/sanitizers
sets=(generic)
generic=(kernels_generic: pack_blocks: encode_blocks: mask_exchange: pack_pairs: test_kernels:)
address=("${generic[@]}")
if [ "$(uname -m)" = x86_64 ]; then
  avx2="-mavx2 -mfma -mf16c"
  sets+=(avx2 avx2-vnni avx512 avx512-far avx512-bf16 amx)
  if grep -qsw avx512_vnni /proc/cpuinfo; then
    avx512="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c"
    address+=("dispatch:-DROOFLAX_TILES_IN_MEMORY -DROOFLAX_VNNI_IN_PAIRS -DROOFLAX_DOTS_IN_LANES")
  else
    avx512="$avx2 -include tools/avx512_in_lanes.h"
    address+=("dispatch:-DROOFLAX_AVX512_IN_LANES -DROOFLAX_TILES_IN_MEMORY -DROOFLAX_VNNI_IN_PAIRS -DROOFLAX_DOTS_IN_LANES")
  fi
  address+=("kernels_avx2:$avx2" "kernels_avx2_vnni:$avx2 -DROOFLAX_VNNI_IN_PAIRS")
  for name in kernels_avx512 kernels_avx512_bf16 kernels_avx512_far kernels_amx; do
    address+=("$name:$avx512 -DROOFLAX_TILES_IN_MEMORY")
  done
else
  address+=("dispatch:-DROOFLAX_GENERIC_ONLY")
fi
thread=("${generic[@]}" "dispatch:-DROOFLAX_GENERIC_ONLY")

# All that are given, one line each, as many at a time as there are processors.
together() { xargs -P "$(nproc)" -d '\n' -I{} bash -c '{}'; }

rm -rf "$out/address" "$out/thread"  # objects of sources that are gone would be linked
mkdir -p "$out/address" "$out/thread"
{
  for object in "${address[@]}"; do
    echo "$compiler $flags -fsanitize=address,undefined -fsanitize-undefined-trap-on-error ${object#*:}" \
      "-c csrc/${object%%:*}.cc -o $out/address/${object%%:*}.o"
  done
  for object in "${thread[@]}"; do
    echo "$compiler $flags -fsanitize=thread ${object#*:} -c csrc/${object%%:*}.cc -o $out/thread/${object%%:*}.o"
  done
} | together
"$compiler" -fsanitize=address,undefined "$out"/address/*.o -pthread -o "$out/address/test"
"$compiler" -fsanitize=thread "$out"/thread/*.o -pthread -o "$out/thread/test"
export ASAN_OPTIONS=handle_sigill=1
{
  echo "set -o pipefail; $out/thread/test generic | sed 's/^/threads, /'"
  for name in "${sets[@]}"; do echo "$out/address/test $name"; done
} | together
