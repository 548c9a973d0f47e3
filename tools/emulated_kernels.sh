#!/usr/bin/env bash
# Compiles the kernels and their own test program for aarch64, and runs it: by qemu's emulation
# elsewhere, as processors with matrices of bytes (i8mm), with dot products alone, and with neither.
#   tools/emulated_kernels.sh [compiler]
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${1:-aarch64-linux-gnu-g++}
out=build/aarch64
rm -rf "$out"
mkdir -p "$out"
for name in test_kernels kernels_generic kernels_neon_dotprod kernels_neon_i8mm dispatch mask_exchange pack_pairs \
  pack_blocks encode_blocks; do
  case $name in
    encode_blocks) flags=(-ffp-contract=off) ;;
    kernels_neon_dotprod) flags=(-ffp-contract=fast -march=armv8.2-a+dotprod) ;;
    kernels_neon_i8mm) flags=(-ffp-contract=fast -march=armv8.2-a+dotprod+i8mm) ;;
    *) flags=(-ffp-contract=fast) ;;
  esac
  "$compiler" -std=c++17 -O3 "${flags[@]}" -Wall -Wextra -Wno-psabi -c "csrc/$name.cc" -o "$out/$name.o"
done
"$compiler" -static "$out"/*.o -pthread -o "$out/test"
if [ "$(uname -m)" = aarch64 ]; then
  "$out/test"
  exit
fi
passed() { qemu-aarch64-static -cpu "$1" "$out/test" | tee /dev/stderr | grep -o '^[a-z0-9-]*: passed' | xargs; }
[ "$(passed cortex-a57)" = "generic: passed" ]
[ "$(passed neoverse-n1)" = "generic: passed neon-dotprod: passed" ]
[ "$(passed max)" = "generic: passed neon-dotprod: passed neon-i8mm: passed" ]
