#!/usr/bin/env bash
# Everything that needs a GPU, from the source tree:
#
#     bench/run_gpu.sh [tests] [bench] [demo] [memcheck] [racecheck]      (all without arguments)
#
# Results and logs go to ${OUT:-bench/results}. Every step runs, also after one has failed; each one's
# exit status is listed at the end, and the script's own is 1 if any was not 0. Needs CuPy, cuda-core,
# pytest and hypothesis in ${PYTHON:-python3}, and compute-sanitizer for the last two steps. Tests of
# the transformers cache are skipped without torch and transformers.
# LIMIT is the longest a step may take, in seconds; SANITIZED what the sanitizer runs, in SHARDS
# processes at a time.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(tests bench demo memcheck racecheck)
python=${PYTHON:-python3}
out=${OUT:-bench/results}
limit=${LIMIT:-1200}
sanitized=${SANITIZED:-tests/gpu}
shards=${SHARDS:-6}
export PYTHONPATH=".:adapters${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export KVCORE_GPU=required # tests that find no GPU fail, instead of being skipped
mkdir -p "$out"
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
name=$(printf '%s' "${gpu:-no-gpu}" | tr '[:upper:] ' '[:lower:]-')
report=()
failed=0

step() { # step NAME COMMAND...: runs it with a log, notes its exit status
    local step=$1 started=$SECONDS status
    shift
    printf '\n== %s: %s\n' "$step" "$*"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$step.log"
    status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || failed=1
    report+=("$(printf '%-10s exit %-3s %4d s' "$step" "$status" $((SECONDS - started)))")
}

stamp() { # the machine, without its name
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv || true
    "$python" -m bench.environment
}

sanitize() { # sanitize TOOL: the tests in $shards parts side by side, since they run 20 times slower
    # A pooling allocator hides accesses past the end of an array: the tests switch CuPy's off.
    # Calls that fail are left out: cuda-python asks the driver for functions that it lacks.
    # No backtraces of the host: for these the sanitizer holds Python's frames, and so whatever arrays
    # are in them, whose leases would not end.
    local tool=$1 started=$SECONDS part status=0 pids=()
    printf '\n== %s: compute-sanitizer in %s parts\n' "$tool" "$shards"
    "$python" -m pytest -q --collect-only -p no:cacheprovider -m "not no_sanitizer" "$sanitized" |
        grep '::' >"$out/$tool.tests"
    for ((part = 0; part < shards; part++)); do
        awk -v n="$shards" -v part="$part" 'NR % n == part' "$out/$tool.tests" >"$out/$tool.$part"
        KVCORE_SANITIZED=1 timeout --kill-after=10 "$limit" compute-sanitizer --tool "$tool" \
            --error-exitcode 99 --report-api-errors no --show-backtrace device \
            "$python" -m pytest -q -p no:cacheprovider "@$out/$tool.$part" \
            >"$out/$tool.$part.log" 2>&1 &
        pids+=($!)
    done
    for ((part = 0; part < shards; part++)); do
        wait "${pids[$part]}" || status=$?
        tail -n 3 "$out/$tool.$part.log"
    done
    cat "$out/$tool".[0-9]*.log >"$out/$tool.log"
    rm -f "$out/$tool".[0-9]* "$out/$tool.tests"
    [ "$status" = 0 ] || failed=1
    report+=("$(printf '%-10s exit %-3s %4d s' "$tool" "$status" $((SECONDS - started)))")
}

printf '== environment\n'
stamp | tee "$out/environment.txt"
if ! "$python" -c 'from kvcore.device import open_device; open_device("cuda").close()'; then
    echo "no GPU that kvcore can open: nothing was run"
    exit 1
fi
for chosen in "${steps[@]}"; do
    case $chosen in
    tests) step tests "$python" -m pytest -p no:cacheprovider tests/gpu ;;
    bench) step bench "$python" -m bench kernels streams beams interop control import --json "$out/$name.json" ;;
    demo)
        # shellcheck disable=SC2016
        step demo bash -o pipefail -c '"$0" -m kvcore.cli demo --device cuda --json | tee "$1"' \
            "$python" "$out/$name-demo.json"
        ;;
    memcheck | racecheck) sanitize "$chosen" ;;
    *)
        report+=("$chosen: no such step")
        failed=1
        ;;
    esac
done

printf '\n== exit statuses\n'
printf '%s\n' "${report[@]}" | tee "$out/statuses.txt"
exit $failed
