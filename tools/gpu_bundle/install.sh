#!/usr/bin/env bash
# install.sh PARTS INTO: check and unpack the parts of make.py. Then `. INTO/env.sh` in the shell that runs servers.
set -euo pipefail
parts=$(realpath "${1:?usage: install.sh PARTS INTO}")
into=$(realpath -m "${2:?usage: install.sh PARTS INTO}")
(cd "$parts" && sha256sum --quiet -c SHA256)
mkdir -p "$into/flashinfer-only"
tar -C "$into" -xJf "$parts/site.tar.xz"
tar -C "$into" -xJf "$parts/nccl.tar.xz"
tar -C "$into/flashinfer-only" -xJf "$parts/flashinfer.tar.xz"  # for `demo --gpu --flashinfer`; SGLang must not find it
cat > "$into/env.sh" <<ENV
export PYTHONPATH="$into" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1           # an older sgl_kernel, built for this torch
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python    # the one in Rust is built for another torch
export FLASHINFER_DISABLE_VERSION_CHECK=1
export LD_PRELOAD="$into/libnccl.so.2" SGLANG_NCCL_SO_PATH="$into/libnccl.so.2"  # torch's own NCCL is older
ENV
echo "installed; now: . $into/env.sh; python -m sglang_sm120.cli.main demo --gpu --flashinfer $into/flashinfer-only"
