#!/usr/bin/env bash
# All that needs a GPU, in one go: tests, kernels, steps, served loads, ladder. Results become docs/results' files.
#   tests/gpu/run_all.sh MODEL_FOLDER SHAREGPT_FILE RESULT_FOLDER
# MODEL_FOLDER needs no weights (python -m loadtest.dummy_model makes one). About an hour on an H200.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=$1 sharegpt=$2 results=$3
export PYTHONPATH=proto:.
mkdir -p "$results"
failed=0
run() {
    echo "== $*"
    "$@" || failed=1
}
# Most of a kernel's test is its compilation; those of engines measure the whole device's memory, one process at a time.
run python -m pytest -q -n 8 -m "not full" tests/kernels
run python -m pytest -q -m "not full" tests/gpu
run python -m pytest -q -m "not full" tests/engine/model
if command -v compute-sanitizer > /dev/null; then
    memcheck() { run compute-sanitizer --tool memcheck --target-processes all python -m pytest -q -m "not full" -p no:benchmark tests/kernels "$@"; }
    memcheck -n 8 -k "not hopper_prefill"
    memcheck -k hopper_prefill  # one after the other: beside each other they once had not ended after minutes
fi
run python tests/gpu/bench_attention.py --output "$results/attention.json"
run python tests/gpu/bench_sampling.py --output "$results/sampling.json"
run python tests/gpu/bench_products.py "$model" --output "$results/products.json"
run python tests/gpu/bench_steps.py "$model" --output "$results/steps.json"
for size in 1 32 64; do
    run python tests/gpu/bench_steps.py "$model" --page-size "$size" --batches 1,32,256 --no-profile --output "$results/pages-$size.json"
done
run python -m loadtest.suite "$model" --repeat 3 --workers 4 --gate --sharegpt "$sharegpt" --result-dir "$results"
run python -m loadtest.suite "$model" --rows card24,card24-sg --workers 4 --sharegpt "$sharegpt" --result-dir "$results"
run python -m loadtest.suite "$model" --rows sg-64,sg-128 --workers 4 --sharegpt "$sharegpt" --result-dir "$results"
for tokens in 2304 8192; do
    run python -m loadtest.suite "$model" --rows long50 --workers 4 --result-dir "$results/long50-$tokens" -- \
        --max-num-batched-tokens "$tokens"
done
run python -m cli bench ladder "$model" --load-format dummy --num-prompts 512 --max-output-len 1024 --prefix-len 512 \
    --prefix-groups 8 --kv-tokens 262144 --repeat 3 --output-json "$results/ladder.json"
exit $failed
