#!/usr/bin/env bash
set -euo pipefail
usage() {
  cat <<'HELP'
Usage: scripts/compile_ahead.sh [--arch ARCH] [--multiprocessors N] [--build DIR] DIR [PART...]

Compiles, without a GPU, what scripts/gpu_check.sh compiles on one: where GPU time is scarce, run this elsewhere first, copy DIR to
the machine with the GPU, and set there, if its NVRTC is of the same version,

    TESSERA_CACHE_DIR=DIR/kernels scripts/gpu_check.sh OUT      # and copy DIR/mutations to OUT/break_kernels/cache

  --arch ARCH           sm_75, sm_80, sm_86, sm_89 or sm_90 (the default)
  --multiprocessors N   of the GPU, on which tiles depend; default 132, an H200
  --build DIR           where `make build` has been; default build

Parts, all of them by default: full, others (suites hostile, long, sanitize, peers, evidence and bench-gpu), racecheck, mutations
(those that results/ does not have as caught). It takes about 20 minutes on 2 cores.
HELP
}
cd "$(dirname "$0")/.."
arch=sm_90 multiprocessors=132 build=build
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --arch | --multiprocessors | --build)
      [ $# -gt 1 ] || { echo "error: $1 needs a value" >&2; exit 2; }
      case $1 in --arch) arch=$2 ;; --multiprocessors) multiprocessors=$2 ;; --build) build=$2 ;; esac
      shift 2 ;;
    -*) echo "error: unknown option $1; --help lists them" >&2; exit 2 ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || { usage >&2; exit 2; }
out=$1
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(full others racecheck mutations)
for part in "${parts[@]}"; do
  [[ " full others racecheck mutations " = *" $part "* ]] || { echo "error: there is no part '$part'; --help lists them" >&2; exit 2; }
done
build=$(cd "$build" && pwd)
mkdir -p "$out/kernels" "$out/mutations"
out=$(cd "$out" && pwd)

# A driver that loads what NVRTC makes, and runs none of it. No case begins, so nothing is verified: exit code 1.
digits=${arch#sm_}
export LD_LIBRARY_PATH=$build/tests/emulated/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export FAKE_CUDA_ARCH=${digits%a} FAKE_CUDA_SMS=$multiprocessors TESSERA_NO_TUNING=1 TESSERA_CACHE_DIR=$out/kernels
compile() { "$build/bin/tessera" verify --device cuda --seconds 0.001 "$@" > /dev/null 2>&1 || true; }
said() { echo "$1: $(find "$out" -name '*.tsr' | wc -l) compiled kernels, $SECONDS s"; }

part_full() {
  local code
  for code in native sm_80 sm_75; do compile --suite full --arch-code $code & done
  compile --suite full --filter e4m3 --arch-code sm_89
  wait
}
part_others() {
  compile --suite hostile --arch-code native,sm_90 &
  compile --suite long --arch-code native,sm_75
  local suite
  for suite in sanitize peers evidence bench-gpu; do compile --suite $suite; done
  wait
}
part_racecheck() {
  local folder
  folder=$(mktemp -d)
  scripts/racecheck_sources.py "$folder/kernels" > /dev/null
  TESSERA_KERNEL_SOURCES=$folder/kernels compile --suite sanitize
  rm -r "$folder"
}
part_mutations() {
  local folder
  folder=$(mktemp -d)
  cp results/*/break_kernels.json "$folder/" 2> /dev/null || true
  scripts/break_kernels.py "$folder" --ahead --tessera "$build/bin/tessera" --cache "$out/mutations" --jobs "$(nproc)"
  rm -r "$folder"
}
for part in "${parts[@]}"; do
  "part_$part"
  said "$part"
done
