"""Names of SGLang's ranks: of this one, and of the prefill ranks that a decode rank looked up."""

from __future__ import annotations

from typing import Any

from kvctl_agent import rank_name


def dp_rank(manager: Any) -> int:
    """Returns the data-parallel rank of a KV manager, as `/route` of the bootstrap server counts it."""
    return int(manager.attn_dp_rank if manager.system_dp_size == 1 else manager.system_dp_rank)


def rank_axes(manager: Any) -> dict[str, tuple[int, int]]:
    """Returns (rank, size) of a KV manager on the axes dp, pp and cp."""
    return {
        "dp": (dp_rank(manager), max(manager.attn_dp_size, manager.system_dp_size)),
        "pp": (manager.pp_rank, manager.pp_size),
        "cp": (manager.attn_cp_rank, manager.attn_cp_size),
    }


def prefill_name(info: Any, host: str, dp: int, pp: int, cp: int, tp: int) -> str:
    """Returns the name that a prefill rank gives itself, from what its bootstrap server says (PrefillServerInfo)."""
    axes = {"dp": (dp, info.dp_size), "pp": (pp, info.pp_size), "cp": (cp, info.attn_cp_size)}
    return rank_name("prefill", axes, tp, f"{host}:{info.prefill_http_port}")
