#!/usr/bin/env bash
# scripts/gpu_check.sh OUT: runs every check that needs a GPU: doctor, the GPU tests, verify (suite full with code for
# this GPU and for older architectures, suites hostile and long, repeated runs), compute-sanitizer on a small suite,
# bench, and the comparison with peers. It writes all output to OUT, updates results/<gpu>/ and prints a summary at the
# end. The exit code is 1 if a check failed, 3 if there is no GPU.
#
# BUILD (default: build) is the build directory; the program is built if it is missing. PYTHON (default: python3) is a
# Python with PyTorch, for the peers. SKIP is a comma-separated list of steps to skip: tests, verify, sanitizer, bench,
# peers. BREAK=1 also runs the mutation tests, which show that the checks catch broken kernels
# (scripts/break_kernels.py).
set -uo pipefail
out=${1:?usage: scripts/gpu_check.sh OUT}
cd "$(dirname "$0")/.."
mkdir -p "$out"
out=$(cd "$out" && pwd)
build=${BUILD:-build}
python=${PYTHON:-python3}
tessera=$build/bin/tessera
# Results are of the library as built, with its own selection of kernels.
unset TESSERA_CODE_ARCH TESSERA_TUNING_TABLE
export TESSERA_NO_TUNING=1
[ -z "${TESSERA_KERNEL_SOURCES:-}" ] || { echo "TESSERA_KERNEL_SOURCES is set: unset it first"; exit 1; }
[ -x "$tessera" ] || make build BUILD="$build" || exit 1

begin=$SECONDS
bad=0
: > "$out/summary.txt"
say() { echo "$*" | tee -a "$out/summary.txt"; }
skipped() { case ",${SKIP:-}," in *",$1,"*) return 0 ;; esac; return 1; }

# verdict NAME CODE SECONDS-OR-NOTHING
verdict() {
  case $2 in
    0) say "ok      $1$3" ;;
    124) say "TIMEOUT $1$3"; bad=1 ;;
    *) say "FAILED  $1, exit code $2$3"; bad=1 ;;
  esac
}

# step NAME LIMIT COMMAND...: the output goes to OUT/NAME.txt, its last line to the summary.
step() {
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  timeout "$limit" "$@" > "$out/$name.txt" 2>&1
  code=$?
  local last
  last=$(grep -v '^\s*$' "$out/$name.txt" | grep -vE '^(verify|bench|kernels): [0-9]+ of' | tail -n "${lines:-1}")
  verdict "$name" $code " ($((SECONDS - start)) s)"
  [ -z "$last" ] || say "$(sed 's/^/          /' <<< "$last")"
  return $code
}

step doctor 60 "$tessera" doctor --json "$out/doctor.json"
gpu=$("$python" - "$out/doctor.json" <<'PY'
import json, re, sys
devices = json.load(open(sys.argv[1])).get("cuda", {}).get("devices", [])
name = devices[0]["name"] if devices else ""
print(re.sub(r"[^a-z0-9]+", "-", re.sub(r"nvidia|geforce", "", name.lower())).strip("-"))
PY
)
if [ -z "$gpu" ]; then
  say "no GPU here: nothing was checked"
  exit 3
fi
record=$out/verified.json
cp "results/$gpu/verified.json" "$record" 2>/dev/null

# Steps that measure no time run in parallel, because they spend most of theirs on the host. They are reported in the
# order in which they started.
started=()
start() {
  local name=$1 limit=$2
  shift 2
  started+=("$name")
  (timeout "$limit" "$@" > "$out/$name.txt" 2>&1; echo $? > "$out/$name.code") &
}
for_information=sanitizer_racecheck_as_is  # it reports hazards that are none, so it cannot fail
finish_all() {
  wait
  for name in "${started[@]}"; do
    local code
    code=$(cat "$out/$name.code")
    rm "$out/$name.code"
    if [ "$name" = $for_information ]; then say "info    $name"; else verdict "$name" "$code" ""; fi
    say "$(grep -E ' passed, |tests? ran|PASSED|SUMMARY|worst error|equal' "$out/$name.txt" | tail -n 3 | sed 's/^/          /')"
  done
}

if ! skipped tests && [ -x "$build/bin/cuda_test" ]; then start cuda_test 200 "$build/bin/cuda_test"; fi
if ! skipped verify; then
  # Code for sm_90 is the portable kernels on Hopper.
  for arch in native sm_90 sm_80 sm_75; do
    start "verify_full_$arch" 400 "$tessera" verify --device cuda --suite full --arch-code $arch \
      --json "$out/verify_full_$arch.json" --record "$record"
  done
  start verify_hostile 120 "$tessera" verify --device cuda --suite hostile --json "$out/verify_hostile.json"
  start verify_hostile_sm_90 120 "$tessera" verify --device cuda --suite hostile --arch-code sm_90 \
    --json "$out/verify_hostile_sm_90.json"
  start verify_long 150 "$tessera" verify --device cuda --suite long --json "$out/verify_long.json"
  start verify_repeat 200 "$tessera" verify --device cuda --suite full --filter det --repeat 100 \
    --json "$out/verify_repeat.json"
fi
if ! skipped sanitizer; then
  if command -v compute-sanitizer > /dev/null; then
    sanitize=(compute-sanitizer --error-exitcode 9)
    small_set=("$tessera" verify --device cuda --suite sanitize)
    for tool in memcheck synccheck initcheck; do
      start "sanitizer_$tool" 200 "${sanitize[@]}" --tool $tool "${small_set[@]}"
    done
    # Only racecheck on the copy that it understands can fail.
    rm -rf "$out/racecheck_kernels"
    "$python" scripts/racecheck_sources.py "$out/racecheck_kernels" > "$out/racecheck_sources.txt" 2>&1
    code=$?
    verdict racecheck_sources $code ": $(cat "$out/racecheck_sources.txt")"
    if [ $code = 0 ]; then
      start sanitizer_racecheck 200 env TESSERA_KERNEL_SOURCES="$out/racecheck_kernels" "${sanitize[@]}" \
        --tool racecheck "${small_set[@]}"
    fi
    start $for_information 200 "${sanitize[@]}" --tool racecheck "${small_set[@]}"
  else
    say "skipped sanitizer: compute-sanitizer is not on the path"
  fi
fi
finish_all
if [[ -f $out/cuda_test.txt ]] && grep -q PASSED "$out/cuda_test.txt" && ! grep -q FAILED "$out/cuda_test.txt"; then
  "$tessera" kernels --record "$record" --by cuda_test --kernel attention/backward_preprocess.cuh
fi
if ! skipped bench; then
  # fp16 uses the same code.
  step bench 90 "$tessera" bench --device cuda --filter bf16 --min-time 0.03 --json "$out/bench.json"
  step evidence 90 "$tessera" bench --device cuda --evidence --min-time 0.03 --json "$out/evidence.json"
fi
if ! skipped peers; then
  if "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
    # The benchmark does not use the rest of the Python package, which need not be installed.
    mkdir -p "$out/path"
    cp -r python/tessera/bench "$out/path/tessera_bench"
    lines=20 step peers 200 env PYTHONPATH="$out/path" "$python" -m tessera_bench \
      --library "$build/lib/libtessera.so" --json "$out/peers.json"
    rm -rf "$out/path"
  else
    say "skipped peers: $python has no PyTorch that sees the GPU"
  fi
fi

if [ "${BREAK:-}" = 1 ]; then
  lines=30 step break_kernels 400 "$python" scripts/break_kernels.py "$out/break_kernels" --tessera "$tessera" \
    --python "$python"
fi

rm -rf "$record.lock" "$out/racecheck_kernels"
"$python" scripts/collect_results.py "$out" "results/$gpu" && say "results/$gpu is up to date"
tar -czf "$out/results-$gpu.tgz" "results/$gpu"  # for committing the results on another machine
"$tessera" kernels | tee -a "$out/summary.txt"
say "$((SECONDS - begin)) s in all on $gpu; $([ $bad = 0 ] && echo 'all checks passed' || echo 'SOME CHECKS FAILED')"
exit $bad
