#!/usr/bin/env bash
# Everything that is recorded of a machine, step by step, into a folder. A step that fails does not stop the others.
#
#   benchmarks/record.sh cpu results                    every step
#   benchmarks/record.sh cuda results tests select      these alone
#
# Needs keysift importable by PYTHON (default: python3). COMMIT names the sources' commit where they are no checkout.
set -uo pipefail
device=$1 out=$2
shift 2
python=${PYTHON:-python3}
commit=(${COMMIT:+--commit "$COMMIT"})
name=$device
mkdir -p "$out"
[ "$device" = cuda ] && name=$("$python" -c 'import torch; print(torch.cuda.get_device_name().split()[-1].lower())')

keysift() { "$python" -m keysift "$@"; }
timed() { # bench STAGE with its record
    local stage=$1 file=$2
    shift 2
    keysift bench "$stage" --device "$device" "${commit[@]}" --json "$out/$file-$name.json" "$@"
}
step_tests() { "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu; }
step_check() { keysift check --device "$device" --tier "$([ "$device" = cuda ] && echo gpu || echo cpu)"; }
step_select() {
    if [ "$device" = cuda ]; then
        timed select select --set all --kernel cuda --kernel triton
    else
        timed select select
    fi
}
step_warm() { timed select select-warm --mode warm; }
step_producer() { timed select select-producer --mode producer; }
step_score() { timed score score; }
step_mla() { timed sparse_mla sparse-mla; }
step_index() { timed index index; }
step_tpot() {
    if [ "$device" = cuda ]; then
        timed tpot tpot --tensor-parallel 8 --batch 1,16,64 --context 8192,131072
    else
        timed tpot tpot --context 8192,32768
    fi
}
step_demo() { keysift demo --device "$device" --context 8192 --png "$out/demo-$name.png" --json "$out/demo-$name.json"; }

all=(tests check select warm producer score mla index tpot demo)
[ "$device" = cuda ] || all=(check select score mla index tpot demo)
failed=()
for step in "${@:-${all[@]}}"; do
    echo "== $step"
    began=$SECONDS
    "step_$step" || failed+=("$step")
    echo "== $step took $((SECONDS - began)) s"
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
