#!/bin/sh
# Installs the peers of compare.py into FOLDER (build/peers): venv/, export/ and llama.cpp/.
# Needs Python 3.11, a C++ compiler and CMake; llama.cpp takes some minutes to build.
#
#     benchmarks/peers/install.sh [FOLDER]
#
# PYTHON=... chooses the interpreter.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/../../build/peers}
python=${PYTHON:-python3.11}
llama_cpp_python=0.3.36
mkdir -p "$folder"
cd "$folder"

"$python" -m venv venv
# torch first: what comes after it then takes that build instead of the newest
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet -r "$here/requirements.txt"

# The source distribution has llama.cpp's tree, and in it the converter
venv/bin/pip download --quiet --no-deps --no-binary llama-cpp-python \
  "llama-cpp-python==$llama_cpp_python"
tar xzf "llama_cpp_python-$llama_cpp_python.tar.gz"
ln -sfn "llama_cpp_python-$llama_cpp_python/vendor/llama.cpp" llama.cpp
# On a processor with AMX its native build ends at its first decode, so there the instruction sets that
# it runs with are named one by one.
native="-DGGML_NATIVE=ON"
if grep -qw amx_tile /proc/cpuinfo 2>/dev/null; then
  native="-DGGML_NATIVE=OFF"
  for set in SSE42 AVX AVX2 FMA F16C BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16; do
    native="$native -DGGML_$set=ON"
  done
fi
CMAKE_ARGS="-DCMAKE_BUILD_TYPE=Release $native" \
  venv/bin/pip install --quiet --no-cache-dir "./llama_cpp_python-$llama_cpp_python.tar.gz"

"$python" -m venv export
export/bin/pip install --quiet torch==2.13.0
export/bin/pip install --quiet -r "$here/requirements-export.txt"
# An image library that optimum-intel asks for. Built for another torch, it breaks the import, and
# no text model needs it.
export/bin/pip uninstall --quiet --yes torchvision
echo "installed in $PWD; now: python benchmarks/peers/compare.py"
