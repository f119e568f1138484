#!/usr/bin/env bash
# Packs what an offline GPU host lacks into OUT (default gpu-site.tar.xz, under 40 MB): for x86-64, CPython 3.12, with
# torch, triton, cuda-bindings, click and rich already there. Run it where package registries can be reached:
#     benchmarks/pack_gpu_site.sh gpu-site.tar.xz [sglang-site.tar.xz]
# and carry the archives to the GPU host beside a clone, where benchmarks/gpu.sh unpacks them.
# Left out is what moving KV cache never loads: NIXL's other backends, Mooncake's store and expert parallelism.
# The second archive (10 MB) has SGLang's classes, for benchmarks/sglang_backends.py, without its models and kernels.
set -euo pipefail

out=$(realpath -m "${1:-gpu-site.tar.xz}")
sglang=${2:+$(realpath -m "$2")}
requirements=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../tests/support/sglang/requirements.txt")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}

wheels() { "$python" -m pip download -qq --disable-pip-version-check --no-deps -d "$work/wheels" "$@"; }
binaries=(--only-binary=:all: --python-version 3.12 --implementation cp)
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_17 manylinux2014 manylinux2010 manylinux_2_34; do
    binaries+=(--platform "${tag}_x86_64")
done
wheels "${binaries[@]}" \
    nixl-cu13==1.5.1 mooncake-transfer-engine-cuda13==0.3.14 pyzmq==27.3.0 orjson==3.13.0 msgspec==0.22.0
wheels nixl==1.5.1 textual==8.2.8 platformdirs==4.14.5 mdit-py-plugins==0.7.0 linkify-it-py==2.2.0 \
    markdown-it-py==4.3.0 mdurl==0.1.2

mkdir -p "$work/site/debs"
for wheel in "$work"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$work/site"; done
# Mooncake links to these.
(cd "$work/site/debs" && apt-get download -qq libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1)

cd "$work/site"
rm -rf nixl_ep* nixl_cu13.scripts nixl_cu13.libs/ucx/libucx_perftest* \
    mooncake/_store*.so mooncake/mooncake_client mooncake/mooncake_master mooncake/libmooncake_pg* mooncake/_ep* mooncake/libmooncake_ep*
for plugin in GPUNETIO INFINIA GUSLI OBJ AZURE_BLOB; do
    rm -f .nixl_cu13.mesonpy.libs/plugins/libplugin_$plugin.so nixl_cu13.libs/nixl/libplugin_$plugin.so
done
tar -cJf "$out" .
echo "$out: $(($(stat -c %s "$out") >> 20)) MiB"

[[ $sglang ]] || exit 0
rm -rf "$work/wheels"
wheels "${binaries[@]}" -r "$requirements" pydantic==2.14.3 pydantic_core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 \
    typing_extensions==4.16.0 opentelemetry-api==1.45.2 starlette==1.10.0 fastapi==0.163.2 annotated-doc==0.0.6 anyio==4.16.0 \
    einops==0.8.2 uvicorn==0.54.0 h11==0.16.0
mkdir "$work/sglang"
for wheel in "$work"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$work/sglang"; done
cd "$work/sglang"
rm -rf sglang/srt/models sglang/multimodal_gen
find sglang -name '*.so' -delete
tar -cJf "$sglang" .
echo "$sglang: $(($(stat -c %s "$sglang") >> 20)) MiB"
