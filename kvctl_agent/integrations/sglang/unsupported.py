"""What of SGLang this backend does not support: refused at start with the reason, and never silently wrong."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel

INSTEAD = "use --disaggregation-transfer-backend nixl or mooncake (without KVCTL_SGLANG=replace)"


def check_supported(args: Any, server_args: Any, *, prefill: bool, mla: bool) -> None:
    """Checks the options of the server and the kinds of its pools.

    Args:
        mla: whether the KV is latent rows.

    Raises:
        ValueError: something is not supported; the text names all of it, and what to use instead.
    """
    parallel, disagg = get_parallel(), get_disagg()
    policy = getattr(disagg, "disaggregation_decode_allocation_policy", "early")  # before 0.5.22 there is no other
    refused = {
        "--enable-kv-cache-sharding": getattr(parallel, "enable_kv_cache_sharding", False),
        "layers split over context-parallel ranks (--enable-dsa-cache-layer-split)": (
            parallel.enable_dsa_cache_layer_split
        ),
        "one group for CP and TP (--enable-cp-tp-group-sharing)": getattr(
            parallel, "enable_cp_tp_group_sharing", False
        ),
        "decode context parallelism (--dcp-size) of a model with KV heads, per-request state or a draft model": (
            parallel.attn_dcp_size > 1 and bool(not mla or args.state_types or args.num_draft_entries)
        ),
        "context parallelism (--dcp-size) on a prefill server": parallel.attn_dcp_size > 1 and prefill,
        "SGLANG_DISAGG_STAGING_BUFFER (kvctl has staging of its own: KVCTL_STAGING)": (
            envs.SGLANG_DISAGG_STAGING_BUFFER.get()
        ),
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK, which has SGLang's metadata on the GPU": (
            os.environ.get("SGLANG_MOONCAKE_CUSTOM_MEM_POOL") == "INTRA_NODE_NVLINK"
        ),
        "--disaggregation-decode-allocation-policy prefill_complete": policy != "early",
        "HiSparse (--enable-hisparse)": getattr(server_args, "enable_hisparse", False),
        "unified memory (--enable-unified-memory)": get_memory().enable_unified_memory,
        "compressed KV of DeepSeek-V4": any(
            getattr(args, name, None) for name in ("mla_compression_ratios", "kv_layout")
        ),
    }
    reasons = [what for what, is_on in refused.items() if is_on]
    if reasons:
        raise ValueError(f"kvctl's transfer backend does not support {', '.join(reasons)}: {INSTEAD}")


def role_switch_obstacle(scheduler: Any, new_role: str) -> str | None:
    """Returns why a server must not become a decode server while it runs; None if it may.

    A prefill server has a radix cache, and SGLang 0.5.23 keeps it for the decode role. Without the decode radix cache's
    flag, its decode queue takes no lock on the prefixes that it finds there, does not free the pages of a request that
    had them already, and evicts nothing when it needs pages: SGLang's check for leaked pages ends the server, or all
    requests wait.
    """
    if new_role != "decode" or scheduler.disable_radix_cache or get_disagg().disaggregation_decode_enable_radix_cache:
        return None
    return (
        "as a decode server, SGLang would leak pages in the radix cache of this prefill server: start it with "
        "--disaggregation-decode-enable-radix-cache or --disable-radix-cache"
    )
