#!/usr/bin/env bash
# Measures SGLang servers in the layouts for which a host has the GPUs: time to the first token, time per token and tokens a
# second with SGLang's own backends, with kvctl's, and of an undivided server. In the environment of the servers:
#     benchmarks/sglang_layouts.sh OUT [OPTIONS of kvctl bench]
# OUT gets a table, JSON and a page of each layout and model. With --plan it prints the command lines of the servers and starts none.
# Variables choose: LAYOUTS (PREFILL-DECODE, such as "tp4-dp4 tp2-tp1"; dp: DP attention), MODELS (layers x KV heads), SIDES,
# TOKENS, CONCURRENCY, ROUNDS, SERVER_ARGS, MODEL_FOLDER (where the weights are written once), PYTHON.
set -euo pipefail

if (($# < 1)); then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
fi
out=$(realpath -m "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l) || gpus=0
layouts=${LAYOUTS:-$(if ((gpus >= 8)); then echo tp4-dp4 tp4-tp4 dp4-dp4 tp2-dp2 tp2-tp1; else
    echo tp2-dp2 tp2-tp2 dp2-dp2 tp2-tp1 $( ((gpus < 4)) || echo tp4-dp4 tp4-tp4 dp4-dp4); fi)}
folder=${MODEL_FOLDER:-${TMPDIR:-/tmp}/kvctl-models}
mkdir -p "$out" "$folder"

write_model() { # LAYERSxHEADS: a Qwen3, whose DP attention SGLang has, of the widths of Llama 3.1 8B; without GPUs a tiny one
    "$python" - "$folder/$1" "$gpus" "${1%x*}" "${1#*x}" <<'END'
import sys
from pathlib import Path
from kvctl.lab.bench.sglang_checkpoint import Llama, write_checkpoint
from kvctl.lab.bench.sglang_models import model_of

folder, gpus, layers, kv_heads = Path(sys.argv[1]), *map(int, sys.argv[2:])
model = model_of(None, {"layers": layers, "kv_heads": kv_heads}, gpus > 0, longest=32768, dp_attention=True)
part = folder.with_name(f"{folder.name}.part")
write_checkpoint(part, shape=Llama(**model.llama))
part.rename(folder)
END
}

models=${MODELS:-32x8 60x2}
if [[ " $* " != *" --plan "* ]]; then
    for model in $models; do
        [[ -d $folder/$model ]] || { echo "writing the weights of $folder/$model" && write_model "$model"; } &
    done
    wait
fi

status=0
for layout in $layouts; do
    prefill=${layout%-*} decode=${layout#*-}
    # Where the two servers share GPUs, neither may take all of the memory for its pool: tokens for 32 long prompts.
    shared=$( ((${prefill:2} + ${decode:2} <= gpus || gpus == 0)) || echo --max-total-tokens 262144)
    for model in $models; do
        name=$layout-$model
        weights=(--model "$folder/$model")
        # With --plan they may not be written yet.
        [[ -d $folder/$model ]] || weights=(--layers "${model%x*}" --kv-heads "${model#*x}")
        echo "== $name"
        "$python" -m kvctl bench --engine sglang "${weights[@]}" \
            "--prefill-${prefill::2}" "${prefill:2}" "--decode-${decode::2}" "${decode:2}" \
            --sides "${SIDES:-staging,nixl,kvctl,kvctl-pipelined}" --sweep "tokens=${TOKENS:-1000,8192}" \
            --sweep "concurrency=${CONCURRENCY:-1,4,16,64,256}" --repeat "${ROUNDS:-2}" --server-args "$shared ${SERVER_ARGS:-}" \
            --save "$out/$name.json" --html "$out/$name.html" "$@" | tee "$out/$name.txt" || status=1
    done
done
exit $status
