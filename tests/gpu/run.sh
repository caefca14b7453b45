#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under six minutes: builds Fusewire from this tree for the GPU that is
# here, runs the tests on it, compute-sanitizer on the kernels, and benchmarks/gpu.py. Needs torch with CUDA, nvcc,
# cmake, ninja, and for the tests pytest; no network. Goes on after a failure. The last lines are a table, and
# everything is in $OUT/run.log (default: build/gpu) as well.
#
#   tests/gpu/run.sh                      on a machine with a GPU
#   FUSEWIRE_FAKE_CUDA=1 tests/gpu/run.sh the same tests and the benchmark's code on the CPU stand-in: no measurements
#
# PYTHON (default python3) is the Python that has torch; SECONDS_IN_ALL (default 350, more on the stand-in) what all stages may take together.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-build/gpu}
python=${PYTHON:-python3}
fake=${FUSEWIRE_FAKE_CUDA:-0}
slow=$((fake == 1 ? 6 : 1)) # on the stand-in
limit=${SECONDS_IN_ALL:-$((350 * slow))}
export PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1
mkdir -p "$out"
exec > >(tee "$out/run.log") 2>&1
table=()
failed=0

row() { table+=("$(printf '%-22s %-8s %5s s  %s' "$1" "$2" "$3" "$4")"); }

# stage NAME SECONDS COMMAND...
stage() {
  local name=$1 seconds=$(($2 * slow)) left=$((limit - SECONDS)) start=$SECONDS code word
  shift 2
  if [ "$left" -lt 5 ]; then
    row "$name" FAIL 0 "no time left"
    failed=1
    return 1
  fi
  if [ "$seconds" -gt "$left" ]; then seconds=$left; fi
  echo "::: $name"
  timeout --kill-after=5 "$seconds" "$@"
  code=$?
  word="exit code $code"
  if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then word="took longer than $seconds s"; fi
  if [ "$code" -eq 0 ]; then
    row "$name" PASS $((SECONDS - start)) ""
  else
    row "$name" FAIL $((SECONDS - start)) "$word"
    failed=1
  fi
  echo "::: $name: exit code $code after $((SECONDS - start)) s"
  return "$code"
}

# leave_out NAME REASON
leave_out() {
  echo "::: $1: left out, $2"
  row "$1" "left out" 0 "$2"
}

finish() {
  echo
  printf '%s\n' "${table[@]}" | tee "$out/summary.txt"
  exit "$failed"
}

has_module() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }

# ---- what is here ----
if ! has_module torch; then
  echo "There is no torch for $python: set PYTHON to one that has it."
  exit 2
fi
capability=$("$python" -c "
import torch
print('%d%d' % torch.cuda.get_device_capability() if torch.cuda.is_available() else '')")
if [ -z "$capability" ] && [ "$fake" != 1 ]; then
  echo "Torch sees no GPU here, so nothing was run."
  echo "FUSEWIRE_FAKE_CUDA=1 $0 runs the same tests on the stand-in for a GPU that the ordinary tests use."
  exit 2
fi
describe() {
  uname -rm
  nproc
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
  nvcc --version 2>/dev/null | tail -n 2
  "$python" -c "
import sys, torch
print('Python', sys.version.split()[0], 'torch', torch.__version__, 'CUDA', torch.version.cuda)
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), 'NCCL', '.'.join(map(str, torch.cuda.nccl.version())))"
}
export -f describe
export python
stage machine 60 bash -c describe

# ---- build ----
build=build/$("$python" -c "import sys; print(sys.implementation.cache_tag)")
if [ -n "$capability" ]; then
  export FUSEWIRE_CUDA=1 FUSEWIRE_CUDA_ARCHITECTURES=${FUSEWIRE_CUDA_ARCHITECTURES:-$capability}
  if ! stage build 200 "$python" setup.py --quiet build_ext --inplace; then
    # Another compiler may warn of what ours does not, which is no reason to learn nothing else here.
    printf '#!/bin/sh\nexec %s "$@" -Wno-error\n' "${CXX:-c++}" >"$out/tolerant-c++"
    chmod +x "$out/tolerant-c++"
    CXX=$(realpath "$out/tolerant-c++")
    export CXX
    rm -rf "$build"
    if ! stage build-tolerant 200 "$python" setup.py --quiet build_ext --inplace; then finish; fi
  fi
  cmake=$(PATH=$("$python" -c "import sysconfig; print(sysconfig.get_path('scripts'))"):$PATH command -v cmake)
  smoke() { "$cmake" -DFUSEWIRE_GPU_TESTS=ON "$build" >/dev/null && "$cmake" --build "$build" --target kernels_smoke; }
  export -f smoke
  export cmake build
  stage build-smoke 60 bash -c smoke
elif ! "$python" -c "import fusewire" 2>/dev/null; then
  if ! stage build 600 "$python" setup.py --quiet build_ext --inplace; then finish; fi
fi
stage info 60 "$python" -m fusewire info

# ---- our declarations of NCCL against its own header ----
nccl=$("$python" -c "
import importlib.util
spec = importlib.util.find_spec('nvidia.nccl')
print(next(iter(spec.submodule_search_locations)) + '/include' if spec else '')" 2>/dev/null)
cuda=$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")/include
if [ -f "$nccl/nccl.h" ] && [ -f "$cuda/cuda_runtime.h" ]; then
  # Nearly all of that test is asserted by the compiler; GoogleTest need not be here.
  mkdir -p "$build/no_gtest/gtest"
  cat >"$build/no_gtest/gtest/gtest.h" <<'END'
#define TEST(suite, name) [[maybe_unused]] static void suite##name()
#define EXPECT_EQ(left, right) static_cast<void>((left) == (right))
END
  stage nccl-header 60 "${CXX:-c++}" -std=c++20 -fsyntax-only -Icsrc "-I$build/no_gtest" -isystem "$nccl" \
    -isystem "$cuda" tests/cpp/nccl_abi_test.cc
else
  leave_out nccl-header "no nccl.h (of the wheel nvidia-nccl-cu13) or no CUDA headers"
fi

# ---- kernels ----
if [ -n "$capability" ]; then
  stage kernels-smoke 30 "$build/kernels_smoke"
else
  leave_out kernels-smoke "no GPU"
fi

# ---- tests ----
tests=("$python" -m pytest -o addopts= -p no:cacheprovider -q -ra --tb=short --durations=5
  --continue-on-collection-errors)
if has_module pytest_timeout; then tests+=(--timeout=60); fi
if ! has_module pytest || ! has_module cloudpickle; then
  leave_out tests "no pytest or no cloudpickle for $python"
else
  stage tests-kernels 60 "${tests[@]}" -m cuda tests/gpu/test_gpu_kernels.py
  stage tests-gpu 150 "${tests[@]}" tests/gpu --deselect tests/gpu/test_gpu_kernels.py
  stage tests-cuda 150 "${tests[@]}" -m cuda tests/python
  version=$("$python" -c "from fusewire import _core; print(_core.nccl_facts()['version'])" 2>/dev/null || echo 0)
  if [ -n "$capability" ] && [ "${version:-0}" -ge 23003 ]; then
    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 FUSEWIRE_GPU_BACKEND=nccl \
      stage tests-nccl-2-ranks 60 "${tests[@]}" -m cuda -k "n2" tests/gpu/test_gpu_collectives.py
  else
    leave_out tests-nccl-2-ranks "NCCL ${version:-none} does not put two ranks on one GPU (2.30.3 does)"
  fi
fi

# ---- measurements ----
if [ -n "$capability" ]; then
  stage benchmark 90 "$python" benchmarks/gpu.py --json "$out/gpu.json"
else
  stage benchmark 90 "$python" benchmarks/gpu.py
fi

# ---- compute-sanitizer ----
sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
if [ -z "$capability" ]; then
  leave_out compute-sanitizer "no GPU"
elif [ -z "$sanitizer" ]; then
  leave_out compute-sanitizer "it is not here"
else
  stage memcheck 60 "$sanitizer" --tool memcheck --error-exitcode 9 "$build/kernels_smoke"
  stage racecheck 60 "$sanitizer" --tool racecheck --error-exitcode 9 "$build/kernels_smoke"
fi
finish
