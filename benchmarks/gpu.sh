#!/usr/bin/env bash
# Measures kvctl on an offline GPU host: from a clone and the archives that benchmarks/pack_gpu_site.sh has packed.
#     benchmarks/gpu.sh SITE_ARCHIVE OUT [SECONDS] [PARTS]
# OUT gets a log, JSON and a table of each part; SECONDS (default 1500) bounds the last part, the list of benches.
# PARTS, joined by commas, in this order: tests (the suite that needs a GPU), copies (kernels against the driver's own
# copies), engines (NIXL and Mooncake with GPU memory), sglang (SGLang's own backend and kvctl in SGLang's queues, if
# sglang-site.tar.xz is beside SITE_ARCHIVE), list (`kvctl bench` as docs/performance.md has it) or list=NAMES (joined by +).
# Needs python3 3.12 with torch, triton, cuda-bindings, click, rich, pytest, setuptools; g++ and Python's headers; root, once, for Mooncake's libraries.
set -euo pipefail

if (($# < 2)); then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
fi
if [[ ! -f $1 ]]; then
    echo "gpu.sh: $1 is no file: pack it with benchmarks/pack_gpu_site.sh where package registries can be reached" >&2
    exit 2
fi
if ! command -v nvidia-smi >/dev/null; then
    echo "gpu.sh: no nvidia-smi here: this needs a host with an NVIDIA driver" >&2
    exit 3
fi
archive=$(realpath "$1")
out=$(realpath -m "$2")
seconds=${3:-1500}
parts=${4:-tests,copies,engines,sglang,list}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out"

site=${GPU_SITE:-${TMPDIR:-/tmp}/kvctl-gpu-site}
if [[ ! -e $site/.unpacked ]]; then
    mkdir -p "$site"
    tar -xJf "$archive" -C "$site"
    for package in "$site"/debs/*.deb; do dpkg -x "$package" "$site/debian"; done
    touch "$site/.unpacked"
fi
sglang=$(dirname "$archive")/sglang-site.tar.xz
if [[ -f $sglang && ! -e .venv/sglang ]]; then
    mkdir -p .venv/sglang
    tar -xJf "$sglang" -C .venv/sglang
fi
# SGLang finds kvctl as a plugin by its metadata; the agent's native code is compiled here.
python3 -c "import setuptools; setuptools.setup()" -q egg_info build_ext --inplace
export LD_LIBRARY_PATH=$site/debian/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1

status=0
part() { # NAME COMMAND...: run it if it was asked for, into its log
    local name=$1
    shift
    [[ ,$parts, == *,$name[,=]* ]] || return 0
    echo "== $name"
    "$@" 2>&1 | tee "$out/$name.log" || status=1
}

nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader | tee "$out/gpus.txt"
part tests python3 -m pytest -q -p no:cacheprovider -k "test_on_gpu or on_a_gpu or gpu_pools" \
    tests/kvctl_agent/device/{test_on_gpu,test_same_as_numpy}.py tests/kvctl_agent/agent/test_on_gpu.py \
    tests/kvctl/lab/ranks/test_on_gpu.py tests/examples/test_gpu_pools.py
part copies python3 benchmarks/gpu_copies.py --save "$out/copies.json"
part engines python3 benchmarks/gpu_engines.py --save "$out/engines.json"
second_gpu=$(($(wc -l <"$out/gpus.txt") > 1 ? 1 : 0))
[[ ! -d .venv/sglang ]] || part sglang python3 benchmarks/sglang_backends.py --device cuda --decode-gpus "$second_gpu" \
    --works tp1-tp1,tp4-tp4,tp4-dp4 --sides "nixl staging,nixl,kvctl" --rounds 1 --json "$out/sglang.json"
only=$(grep -o "list=[^,]*" <<<"$parts" | cut -d= -f2 | tr + ,) || true
part list python3 benchmarks/gpu_list.py --seconds "$seconds" --out "$out" --decode-gpus "$second_gpu" ${only:+--only "$only"}
exit $status
