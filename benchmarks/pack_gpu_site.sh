#!/usr/bin/env bash
# Packs what an offline GPU host lacks into OUT (default gpu-site.tar.xz, under 40 MB): for x86-64, CPython 3.12, with
# torch, triton, cuda-bindings, click and rich already there. Run it where package registries can be reached:
#     benchmarks/pack_gpu_site.sh gpu-site.tar.xz
# and carry the archive to the GPU host beside a clone, where benchmarks/gpu.sh unpacks it.
# Left out is what moving KV cache never loads: NIXL's other backends, Mooncake's store and expert parallelism.
set -euo pipefail

out=$(realpath -m "${1:-gpu-site.tar.xz}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}

wheels() { "$python" -m pip download -qq --disable-pip-version-check --no-deps -d "$work/wheels" "$@"; }
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${tag}_x86_64")
done
wheels --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    nixl-cu13==1.5.1 mooncake-transfer-engine-cuda13==0.3.14 pyzmq==27.3.0 orjson==3.13.0 msgspec==0.22.0 zstandard==0.25.0
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
