#!/usr/bin/env bash
# Compiles the kernels and their own test program for aarch64, and runs it: by qemu's emulation
# elsewhere. There they are the generic ones, in the compiler's NEON.
#   tools/emulated_kernels.sh [compiler]
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${1:-aarch64-linux-gnu-g++}
out=build/aarch64
rm -rf "$out"
mkdir -p "$out"
for name in test_kernels kernels_generic dispatch mask_exchange pack_pairs pack_blocks encode_blocks; do
  [ "$name" = encode_blocks ] && contract=off || contract=fast
  "$compiler" -std=c++17 -O3 "-ffp-contract=$contract" -Wall -Wextra -Wno-psabi \
    -c "csrc/$name.cc" -o "$out/$name.o"
done
"$compiler" -static "$out"/*.o -pthread -o "$out/test"
run=()
[ "$(uname -m)" = aarch64 ] || run=(qemu-aarch64-static)
time "${run[@]}" "$out/test"
