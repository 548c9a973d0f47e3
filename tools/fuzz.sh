#!/usr/bin/env bash
# Builds tools/fuzz_ffi.cc with the address and undefined behaviour sanitizers, with the kernels that
# tools/sanitize.sh left in build/sanitizers; runs it for every instruction set.
#   [OPTIMISE=-O1] tools/fuzz.sh [compiler [python with jaxlib [draws]]]
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${1:-c++}
python=${2:-.venv/bin/python}
draws=${3:-2000}
jaxlib=$("$python" -c "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0])")
kernels=build/sanitizers/address
out=build/sanitizers/fuzz
rm -rf "$out"  # objects of sources that are gone would be linked
mkdir -p "$out"
flags="-std=c++17 ${OPTIMISE:--O0} -g -ffp-contract=fast -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized"
sanitize="-fsanitize=address,undefined -fsanitize-undefined-trap-on-error"
export ASAN_OPTIONS=handle_sigill=1  # as tools/sanitize.sh
sources=(tools/fuzz_ffi csrc/adapters_ffi csrc/matmul_ffi csrc/sample_ffi csrc/attention_ffi csrc/cache_ffi csrc/mask_exchange
  csrc/encode_blocks csrc/pack_blocks csrc/recurrent_ffi csrc/rows_ffi csrc/transposed_ffi csrc/whole_ffi)
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} \
  sh -c "$compiler $flags $sanitize -Icsrc -isystem $jaxlib/include -c {}.cc -o $out/\$(basename {}).o"
"$compiler" $sanitize "$out"/*.o "$kernels"/{dispatch,kernels_*}.o -pthread -o "$out/fuzz"
pids=()
for set in generic avx2 avx2-vnni avx512 avx512-far avx512-bf16 amx; do
  "$out/fuzz" "$draws" "$set" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
