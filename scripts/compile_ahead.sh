#!/usr/bin/env bash
# scripts/compile_ahead.sh DIR: compiles, without a GPU, what scripts/gpu_check.sh compiles on one. Where GPU time is scarce, run this
# elsewhere first, copy DIR to the machine with the GPU, and use it there, if its NVRTC is of the same version:
#
#   TESSERA_CACHE_DIR=DIR/kernels scripts/gpu_check.sh OUT      # and copy DIR/mutations to OUT/break_kernels/cache
#
# Mutations that results/ has as caught are left out. It takes about 20 minutes on 2 cores. BUILD (default: build) is where
# `make build` has been; ARCH (default: 90) the GPU's compute capability, and MULTIPROCESSORS (default: 132, an H200) how many it
# has, on which tiles depend.
set -euo pipefail
out=${1:?usage: scripts/compile_ahead.sh DIR}
cd "$(dirname "$0")/.."
. scripts/verify_runs.sh
build=$(cd "${BUILD:-build}" && pwd)
mkdir -p "$out/kernels" "$out/mutations"
out=$(cd "$out" && pwd)

# A driver that loads what NVRTC makes, and runs none of it. No case begins, so nothing is verified: exit code 1.
export LD_LIBRARY_PATH=$build/tests/emulated/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export FAKE_CUDA_ARCH=${ARCH:-90} FAKE_CUDA_SMS=${MULTIPROCESSORS:-132} TESSERA_NO_TUNING=1 TESSERA_CACHE_DIR=$out/kernels
compile() {
  "$build/bin/tessera" verify --device cuda --seconds 0.001 "$@" > /dev/null 2>&1 || true
  echo "$*: $(find "$out" -name '*.tsr' | wc -l) kernels, $SECONDS s"
}
wait_for_core() { while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done; }

for name in full long hostile full_sm_89; do  # repeat has no kernels of its own
  for code in ${verify_codes[$name]//,/ }; do
    wait_for_core
    # shellcheck disable=SC2086
    compile ${verify_options[$name]} --arch-code "$code" &
  done
done
for suite in sanitize peers evidence bench-gpu; do
  wait_for_core
  compile --suite $suite &
done
wait
copies=$(mktemp -d)
scripts/racecheck_sources.py "$copies/racecheck" > /dev/null
TESSERA_KERNEL_SOURCES=$copies/racecheck compile --suite sanitize
cp results/*/break_kernels.json "$copies/" 2> /dev/null || true
scripts/break_kernels.py "$copies" --ahead --tessera "$build/bin/tessera" --cache "$out/mutations" --jobs "$(nproc)"
rm -r "$copies"
