#!/usr/bin/env bash
# Builds csrc/test_kernels.cc with the address, undefined behaviour and thread sanitizers; runs it.
# Which instructions compute makes no difference to threads: of those the generic kernels are enough.
# Without optimisation, which would leave out some of what is wrong, and takes five times as long.
# A processor without AVX-512 runs that code too, lane after lane (tools/avx512_in_lanes.h).
# Tiles of AMX are arrays (csrc/tiles.h): sanitizers see what is read into them.
# The objects with the address sanitizer stay in build/sanitizers, for tools/fuzz.sh.
#   tools/sanitize.sh [compiler]
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${1:-c++}
flags="-std=c++17 -O0 -g -ffp-contract=fast -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized"
avx2=(-mavx2 -mfma -mf16c)
avx512=(-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c)

for sanitizer in address,undefined thread; do
  out=build/sanitizers/${sanitizer%,*}
  mkdir -p "$out"
  objects=()
  pids=()
  build() {
    local name=$1
    shift
    "$compiler" $flags "-fsanitize=$sanitizer" -fno-sanitize-recover=all "$@" \
      -c "csrc/$name.cc" -o "$out/$name.o" &
    pids+=($!)
    objects+=("$out/$name.o")
  }
  build test_kernels
  build kernels_generic
  build mask_exchange
  build pack_pairs
  build pack_blocks
  build encode_blocks
  if [ "$sanitizer" = thread ] || [ "$(uname -m)" != x86_64 ]; then
    build dispatch -DROOFLAX_GENERIC_ONLY
  else
    build kernels_avx2 "${avx2[@]}"
    if grep -qsw avx512_vnni /proc/cpuinfo; then
      build dispatch -DROOFLAX_TILES_IN_MEMORY
      for name in kernels_avx512 kernels_avx512_far kernels_amx; do
        build $name "${avx512[@]}" -DROOFLAX_TILES_IN_MEMORY
      done
    else
      build dispatch -DROOFLAX_AVX512_IN_LANES -DROOFLAX_TILES_IN_MEMORY
      for name in kernels_avx512 kernels_avx512_far kernels_amx; do
        build $name "${avx2[@]}" -include tools/avx512_in_lanes.h -DROOFLAX_TILES_IN_MEMORY
      done
    fi
  fi
  for pid in "${pids[@]}"; do wait "$pid"; done
  "$compiler" "-fsanitize=$sanitizer" "${objects[@]}" -pthread -o "$out/test"
  echo "sanitizer $sanitizer:"
  "$out/test"
done
