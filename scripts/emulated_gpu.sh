#!/usr/bin/env bash
set -euo pipefail
usage() {
  cat <<'HELP'
Usage: scripts/emulated_gpu.sh [--arch ARCH] [--seed N] [--build DIR] COMMAND...

Runs a command with a GPU that is emulated on the CPU: the same kernels, thread by thread (docs/measuring.md). It shows whether
they are right; its times mean nothing.

  --arch ARCH   sm_75, sm_80, sm_86, sm_89 or sm_90 (the default)
  --seed N      of the order in which warps run and copies arrive; default 0
  --build DIR   where `make build` has been; default build

Compiled kernels are kept in DIR/tests/emulated/cache.

  scripts/emulated_gpu.sh build/bin/tessera verify --device cuda --suite quick
  scripts/emulated_gpu.sh --arch sm_80 build/bin/tessera verify --device cuda --suite full --filter bwd/bf16
HELP
}
root=$(cd "$(dirname "$0")/.." && pwd)
arch=sm_90 seed=0 build=$root/build
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --arch | --seed | --build)
      [ $# -gt 1 ] || { echo "error: $1 needs a value" >&2; exit 2; }
      case $1 in --arch) arch=$2 ;; --seed) seed=$2 ;; --build) build=$2 ;; esac
      shift 2 ;;
    -*) echo "error: unknown option $1; --help lists them" >&2; exit 2 ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || { usage >&2; exit 2; }
digits=${arch#sm_}
digits=${digits%a}
case $digits in 75 | 80 | 86 | 89 | 90) ;; *) echo "error: --arch $arch: sm_75, sm_80, sm_86, sm_89 or sm_90" >&2; exit 2 ;; esac
emulated=$(cd "$build" 2>/dev/null && pwd)/tests/emulated
[ -e "$emulated/nvrtc/libnvrtc.so.13" ] || { echo "error: there is no $emulated/nvrtc/libnvrtc.so.13: make build makes it" >&2; exit 2; }
export LD_LIBRARY_PATH=$emulated/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} TESSERA_NVRTC=$emulated/nvrtc/libnvrtc.so.13
export TESSERA_CACHE_DIR=$emulated/cache TESSERA_NO_TUNING=1 FAKE_CUDA_ARCH=$digits EMULATED_SEED=$seed
exec "$@"
