#!/usr/bin/env bash
# scripts/gpu_check.sh OUT [STAGE...]: the checks that need a GPU, in stages of at most 8 minutes, 25 in all on an H200 with
# 16 cores; the first four measure no time and run two and two side by side if the GPU has the memory:
#
#   tests      doctor, the GPU tests of the library and of the Python package
#   verify     suite full with code for this GPU and for older ones, suites hostile and long, repeated runs
#   sanitizer  compute-sanitizer on a small suite
#   break      mutation tests: that the checks catch broken kernels
#   fuzz       random small problems
#   bench      times of every shape, many single calls of some, and bytes of memory traffic
#   peers      the comparison with other libraries
#   unfused    some shapes beside SDPA's unfused computation and FlexAttention (only if named)
#   training   whole training steps of examples/transformer_np (likewise; needs the Python package on the path)
#   products   products, MLPs, experts, losses and norms beside other libraries (likewise)
#
# Without names: all but the last three. A stage that has passed is not run again with the same OUT (remove OUT/STAGE.passed to
# repeat it), and verify and break keep what passed with the same kernels, so a run that was stopped can go on. Everything
# is written to OUT, results/<gpu>/ is updated, and the summary names what failed, what was skipped and what was not run.
# The exit code is 1 if a check failed, 3 if there is no GPU.
#
# STOP_AFTER (default: 310) is the number of seconds after which verify, break and fuzz begin nothing more; the same command
# goes on with the rest. The first four stages end at most 165 s later, or 120 s after that for each step that found no GPU
# memory beside the others, or in which compute-sanitizer lost track, and ran again.
#
# BUILD (default: build) is the build directory; the program is built if it is missing. PYTHON (default: python3) is a
# Python with PyTorch, for the peers, and with pytest, for the package's tests, which need the package on its path.
set -uo pipefail
# A step has a process group of its own, which a signal to this script's does not reach.
timeout() { setpriv --pdeathsig TERM timeout -k 10 "$@"; }
out=${1:?usage: scripts/gpu_check.sh OUT [STAGE...]}
shift
stages=("$@")
all=(tests verify sanitizer break fuzz bench peers unfused training products)
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]:0:7}")
# More at once are slower: a GPU serves one process at a time.
side_by_side=("tests verify" "sanitizer break")
memory_for_two=64  # GB
cd "$(dirname "$0")/.."
. scripts/verify_runs.sh
mkdir -p "$out"
out=$(cd "$out" && pwd)
build=${BUILD:-build}
python=${PYTHON:-python3}
tessera=$build/bin/tessera
stop_after=${STOP_AFTER:-310}
# Results are of the library as built, with its own selection of kernels.
unset TESSERA_CODE_ARCH TESSERA_TUNING_TABLE
export TESSERA_NO_TUNING=1
[ -z "${TESSERA_KERNEL_SOURCES:-}" ] || { echo "TESSERA_KERNEL_SOURCES is set: unset it first"; exit 1; }
[ -x "$tessera" ] || make build BUILD="$build" || exit 1

for stage in "${stages[@]}"; do
  [[ " ${all[*]} " = *" $stage "* ]] || { echo "there is no stage '$stage'"; exit 1; }
done

summary=/dev/null
bad=0
say() { echo "$*" | tee -a "$summary"; }
# A stage with a step that could not be run has not passed: it is run again.
skip() {
  say "skipped $*"
  skipped=1
}

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

# Steps that measure no time run in parallel, because they spend most of theirs on the host; no more at once than fit into
# the GPU's memory. They are reported in the order in which they started.
at_once=10
wait_for_room() { while [ "$(jobs -rp | wc -l)" -ge $at_once ]; do wait -n; done; }
# A step that ends with one of these runs once more, after the others of its stage: memory that they held, a tool that lost
# track. So does racecheck if it hung.
not_its_fault='CUDA_ERROR_OUT_OF_MEMORY|CUDA out of memory|Internal Sanitizer Error'
limit_of_second=120  # seconds
started=()
start() {
  local name=$1 limit=$2
  shift 2
  wait_for_room
  started+=("$name")
  printf '%q ' "$@" > "$out/$name.command"
  (timeout "$limit" "$@" > "$out/$name.txt" 2>&1; echo $? > "$out/$name.code") &
}
finish_all() {
  wait
  local name code
  for name in "${started[@]}"; do
    code=$(cat "$out/$name.code")
    rm "$out/$name.code"
    local why=
    [ "$code" = 0 ] || why=$(grep -m 1 -E "$not_its_fault" "$out/$name.txt")
    [[ $code$name != @(124|137)sanitizer_racecheck* ]] || why="hung"
    if [ -n "$why" ] && [ -e "$out/$name.command" ]; then
      say "again   $name: $why"
      mv "$out/$name.txt" "$out/$name.first.txt"
      eval "timeout $limit_of_second $(cat "$out/$name.command")" > "$out/$name.txt" 2>&1
      code=$?
    fi
    rm -f "$out/$name.command"
    verdict "$name" "$code" ""
    grep -E ' passed|tests? ran|PASSED|SUMMARY|worst error|equal|problems' "$out/$name.txt" | tail -n 6 | sed 's/^/          /' |
      tee -a "$summary"
    grep -E '^SKIPPED|^\[  SKIPPED \]|^not run' "$out/$name.txt" | sort -u | sed "s/^/skipped in $name: /" | tee -a "$summary"
  done
  started=()
}

# This test makes the GPU fault, before anything else is on it: a context beside it was once lost, too.
fault_test=Errors.a_lost_context*
run_fault_test() {
  [ -x "$build/bin/cuda_test" ] || return
  timeout 120 "$build/bin/cuda_test" --gtest_filter="$fault_test" > "$out/fault_test.txt" 2>&1
  echo $? > "$out/fault_test.code"
}

stage_tests() {
  [ ! -e "$out/fault_test.code" ] || started+=(fault_test)
  if [ -x "$build/bin/cuda_test" ]; then
    start cuda_test 300 "$build/bin/cuda_test" --gtest_filter="-$fault_test"
  else
    skip "cuda_test: not built"
  fi
  if "$python" -c 'import tessera, pytest, torch, sys; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
    local workers=()
    "$python" -c 'import xdist' 2> /dev/null && workers=(-n $(($(nproc) / 3 + 1)) --dist worksteal)
    start python $((stop_after + 160)) "$python" -m pytest -q -rs -p no:cacheprovider "${workers[@]}" -m cuda tests/python
  else
    skip "python: $python has no tessera and pytest, or no PyTorch that sees the GPU"
  fi
  finish_all
  if grep -qs PASSED "$out/cuda_test.txt" && ! grep -q FAILED "$out/cuda_test.txt"; then
    "$tessera" kernels --record "$record" --by cuda_test --kernel attention/backward_preprocess.cuh
  fi
}

stage_verify() {
  local verify=("$tessera" verify --device cuda) suite part left
  for suite in long hostile repeat full_sm_89; do
    start "verify_$suite" $((stop_after + 40)) "${verify[@]}" ${verify_options[$suite]} --arch-code "${verify_codes[$suite]}" \
      --seconds "$stop_after" --resume "$out/verify_$suite.json" --json "$out/verify_$suite.json"
  done
  # The suite in parts side by side, then all of them together: what no part has, or had no time for.
  mkdir -p "$out/parts"
  for part in fwd/ bwd/ dec/ gemm/ mlp/ moe/ norm rotary/ gmm linear_cross; do
    wait_for_room
    left=$((stop_after - SECONDS + from))
    [ $left -gt 0 ] || break
    timeout $((left + 40)) "${verify[@]}" --suite full --arch-code "${verify_codes[full]}" --filter $part --seconds $left \
      --resume "$out"/parts/*.json "$out/verify_full.json" --json "$out/parts/${part%/}.json" > "$out/parts/${part%/}.txt" 2>&1 &
  done
  finish_all
  lines=6 step verify_full 110 "${verify[@]}" --seconds 70 --suite full --arch-code "${verify_codes[full]}" \
    --resume "$out"/parts/*.json "$out/verify_full.json" --json "$out/verify_full.json" --record "$record"
}

stage_sanitizer() {
  if ! command -v compute-sanitizer > /dev/null; then
    skip "sanitizer: compute-sanitizer is not on the path"
    return
  fi
  local sanitize=(compute-sanitizer --error-exitcode 9) small_set=("$tessera" verify --device cuda --suite sanitize) code
  timeout 120 "${small_set[@]}" > "$out/sanitize.txt" 2>&1  # compiles the kernels once, for all of them
  for tool in memcheck initcheck synccheck; do
    start "sanitizer_$tool" $((stop_after + 90)) "${sanitize[@]}" --tool $tool "${small_set[@]}"
  done
  # On a copy that it understands.
  rm -rf "$out/racecheck_kernels"
  "$python" scripts/racecheck_sources.py "$out/racecheck_kernels" > "$out/racecheck_sources.txt" 2>&1
  code=$?
  verdict "sources of racecheck" $code ": $(cat "$out/racecheck_sources.txt")"
  # In parts, so that one in which the tool loses track is soon run again. Some cases are in two: bwd/ is in layernorm_bwd/.
  local part parts
  rm -f "$out"/sanitizer_racecheck*
  parts=$("$tessera" cases --suite sanitize | sed 's#/.*#/#' | sort -u)
  [ -n "$parts" ] || verdict "parts of racecheck" 1 ""
  [ $code = 0 ] || parts=
  for part in $parts; do
    start "sanitizer_racecheck_${part%/}" 120 env TESSERA_KERNEL_SOURCES="$out/racecheck_kernels" \
      "${sanitize[@]}" --tool racecheck "${small_set[@]}" --filter "$part"
  done
  finish_all
  rm -rf "$out/racecheck_kernels"
}

# Seeds far apart, so that each draws kinds of its own, and together at most 200 kernel instances. Few processes, because the
# GPU runs one of them at a time.
stage_fuzz() {
  local n
  for n in 1 2; do
    start "fuzz_$n" 260 "$tessera" fuzz --device cuda --problems 50000 --kinds 12 --instances 100 --threads $(($(nproc) / 2)) \
      --seed "${n}0000001" --seconds $((stop_after < 220 ? stop_after : 220)) --json "$out/fuzz_$n.json"
  done
  finish_all
}

stage_bench() {
  # fp16 uses the same code.
  step bench 150 "$tessera" bench --device cuda --filter bf16 --min-time 0.03 --json "$out/bench.json"
  step evidence 240 "$tessera" bench --device cuda --evidence --min-time 0.03 --json "$out/evidence.json"
  if ! command -v ncu > /dev/null; then
    skip "dram_bytes: ncu is not on the path"
  elif ! "$python" -c 'import tessera, torch, sys; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
    skip "dram_bytes: $python has no tessera, or no PyTorch that sees the GPU"
  else
    lines=17 step dram_bytes 90 "$python" bench/dram_bytes.py --json "$out/dram_bytes.json"
  fi
}

# attention_bench NAME LIMIT OPTIONS...: the benchmark does not use the rest of the Python package, which need not be
# installed.
attention_bench() {
  local name=$1 limit=$2
  shift 2
  if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
    skip "$name: $python has no PyTorch that sees the GPU"
    return
  fi
  mkdir -p "$out/path"
  cp -r python/tessera/bench "$out/path/tessera_bench"
  lines=20 step "$name" "$limit" env PYTHONPATH="$out/path${PYTHONPATH:+:$PYTHONPATH}" "$python" -m tessera_bench \
    --library "$build/lib/libtessera.so" --json "$out/$name.json" "$@"
  rm -rf "$out/path"
}

stage_peers() {
  attention_bench peers 460 --suite odd,table,small,decode --peers fa2,cudnn,fa3,fa4,cudnn-det,fa4-det --rounds 10
}

stage_unfused() { attention_bench peers_unfused 200 --suite table --peers math,flex --rounds 10 --filter b8_s2048; }

stage_training() {
  lines=40 step training 470 "$python" -m tessera.bench --suite np --json "$out/training.json"
}

stage_products() {
  lines=40 step products 470 "$python" -m tessera.bench --suite products --resume --json "$out/products.json"
}

# What earlier runs caught with the same kernels is not run again.
stage_break() {
  mkdir -p "$out/break_kernels"
  [ -e "$out/break_kernels/break_kernels.json" ] ||
    cp "results/$gpu/break_kernels.json" "$out/break_kernels/" 2> /dev/null
  lines=1 step break_kernels $((stop_after + 165)) "$python" scripts/break_kernels.py "$out/break_kernels" --tessera "$tessera" \
    --python "$python" --cache "$out/break_kernels/cache" --jobs $(($(nproc) * 3 / 4 + 1)) --seconds $stop_after
  cp "$out"/break_kernels/break_kernels.{txt,json} "$out/" 2> /dev/null
  grep -E ' (NO|not run)( |$)' "$out/break_kernels.txt" | sed 's/^/          /' | tee -a "$summary"
}

begin=$SECONDS
step doctor 60 "$tessera" doctor --json "$out/doctor.json"
read -r gpu memory <<< "$("$python" - "$out/doctor.json" <<'PY'
import json, re, sys
devices = json.load(open(sys.argv[1])).get("cuda", {}).get("devices", [])
if devices:
    name = re.sub(r"[^a-z0-9]+", "-", re.sub(r"nvidia|geforce", "", devices[0]["name"].lower())).strip("-")
    print(name, devices[0].get("memory_bytes", 0) // 10**9)
PY
)"
if [ -z "$gpu" ]; then
  say "no GPU here: nothing was checked"
  exit 3
fi
record=$out/verified.json
[ -e "$record" ] || cp "results/$gpu/verified.json" "$record" 2> /dev/null

run_stage() {
  summary=$out/$1.summary
  rm -f "$summary"
  bad=0
  skipped=0
  from=$SECONDS
  "stage_$1"
  say "$([ $bad = 0 ] && echo passed || echo FAILED): stage $1, $((SECONDS - from)) s"
  [ $bad$skipped = 00 ] && touch "$out/$1.passed"
}
due=()
for stage in "${stages[@]}"; do [ -e "$out/$stage.passed" ] || due+=("$stage"); done
is_due() { [[ " ${due[*]} " = *" $1 "* ]]; }
is_due tests && run_fault_test
for pair in "${side_by_side[@]}"; do
  for stage in $pair; do
    is_due "$stage" || continue
    run_stage "$stage" &
    [ "$memory" -ge $memory_for_two ] || wait
  done
  wait
done
for stage in "${due[@]}"; do
  [[ " ${side_by_side[*]} " = *" $stage "* ]] || run_stage "$stage"
done

summary=$out/summary.txt
: > "$summary"
for stage in "${all[@]}"; do
  if [ -e "$out/$stage.summary" ]; then cat "$out/$stage.summary" >> "$summary"; else echo "not run: stage $stage" >> "$summary"; fi
done
bad=0
for stage in "${due[@]}"; do
  grep -qsE '^(passed|FAILED): stage' "$out/$stage.summary" || echo "FAILED: stage $stage did not end" >> "$summary"
done
grep -qE '^(FAILED|TIMEOUT)' "$summary" && bad=1
rm -f "$record.lock"
"$python" scripts/collect_results.py "$out" "results/$gpu"
tar -czf "$out/results-$gpu.tgz" "results/$gpu"  # for committing the results on another machine
"$tessera" kernels | tee -a "$summary"
grep -E '^(passed|FAILED|TIMEOUT|not run|skipped)' "$summary"
say "$((SECONDS - begin)) s on $gpu; $([ $bad = 0 ] && echo 'all checks that were run passed' || echo 'SOME CHECKS FAILED')"
exit $bad
