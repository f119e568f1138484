"""What SGLang's managers show of themselves and does not change: sizes, identity and settings."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from kvctl_agent.contract.snapshots import ConfigRow, Role
from kvctl_agent.integrations.observe.documents import setting, variable_origin
from kvctl_agent.integrations.sglang.rank_names import rank_axes
from kvctl_agent.integrations.sglang.releases import staging_context

_SETTINGS: tuple[tuple[str, str, str, str], ...] = (
    ("bootstrap_timeout_s", "bootstrap_timeout", "s", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"),
    ("waiting_timeout_s", "waiting_timeout", "s", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"),
    ("heartbeat_s", "heartbeat_interval", "s", "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"),
)
"""Key of the agent's configuration with the same meaning, attribute of the manager, unit, variable of SGLang."""


class RankShape(NamedTuple):
    """Sizes of an observed rank.

    Attributes:
        page_bytes: KV bytes of one page, all layers and heads of this rank.
        layers: layers [lo, hi) of this rank.
        rank: number of a prefill rank over tp, pp and cp, which its messages have.
        heads: KV heads of this rank; total_heads: of the model. 0: unknown, or one latent per token (MLA).
    """

    role: Role
    page_bytes: int
    layers: tuple[int, int]
    tp_size: int
    rank: int = 0
    heads: int = 0
    total_heads: int = 0

    def bytes_to(self, pages: int, decode_tp_size: int) -> int:
        """Returns the KV bytes of `pages` that a prefill rank sends to a decode rank of this TP size."""
        nbytes = pages * self.page_bytes
        if self.heads and decode_tp_size > self.tp_size:
            nbytes = nbytes * max(1, self.total_heads // decode_tp_size) // self.heads
        return nbytes


def engine_of(manager: Any) -> str:
    """Returns the name of a manager's transfer engine: nixl or mooncake."""
    return type(manager).__name__.removesuffix("KVManager").lower()


def shape_of(manager: Any) -> RankShape:
    """Returns the sizes of a manager's rank."""
    args, role = manager.kv_args, manager.disaggregation_mode.value
    layers = list(getattr(args, "kv_layer_ids", None) or ())
    if not layers:
        count = len(args.kv_item_lens) // (1 if manager.is_mla_backend else 2)
        layers = list(range(getattr(args, "prefill_start_layer", 0) or 0, count))
    heads = 0 if manager.is_mla_backend else int(getattr(args, "kv_head_num", 0) or 0)
    total = int(getattr(args, "total_kv_head_num", 0) or 0) or heads * manager.attn_tp_size
    bounds = (min(layers), max(layers) + 1) if layers else (0, 0)
    rank = int(manager._prefill_unique_rank())
    return RankShape(role, int(manager.kv_item_lens_sum), bounds, manager.attn_tp_size, rank, heads, total)


def description(manager: Any, shape: RankShape) -> dict[str, Any]:
    """Returns the fields of `Status` that do not change."""
    args, (lo, hi) = manager.kv_args, shape.layers
    axes = {**rank_axes(manager), "tp": (manager.attn_tp_rank, manager.attn_tp_size)}
    unique = 0
    for rank, size in axes.values():
        unique = unique * size + rank
    pool = {"page_size": args.page_size, "bytes": sum(args.kv_data_lens), "layers": hi - lo}
    if args.kv_item_lens:
        pool["pages"] = args.kv_data_lens[0] // args.kv_item_lens[0]
    if shape.heads:
        pool["heads"] = shape.heads
    engine = engine_of(manager)
    backend = os.environ.get("SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX") if engine == "nixl" else ""
    return {
        "rank": {**{axis: rank for axis, (rank, _) in axes.items()}, "unique": unique},
        "sizes": {axis: size for axis, (_, size) in axes.items()},
        "registry": None,
        "transport": {"engine": engine, "backend": backend, "lanes": []},
        "device": _device_of(manager),
        "pool": pool,
        "dtypes": {},
        "metrics_url": None,
    }


def config_rows(manager: Any) -> list[ConfigRow]:
    """Returns the settings of SGLang that correspond to an agent's."""
    rows = [
        _setting(key, value, unit, variable)
        for key, attribute, unit, variable in _SETTINGS
        if (value := getattr(manager, attribute, None)) is not None
    ]
    misses = getattr(manager, "max_failures", None)
    if misses is not None:
        lost_s = misses * float(manager.heartbeat_interval)
        rows.append(_setting("lost_s", lost_s, "s", "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"))
    if (ring := getattr(staging_context(manager), "allocator", None)) is not None:
        rows.append(_setting("staging_ring_mb", ring.total_size >> 20, "MiB", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB"))
    return rows


def _setting(key: str, value: float, unit: str, variable: str) -> ConfigRow:
    return setting(key, value, unit, variable_origin(variable), f"SGLang's {variable}")


def _device_of(manager: Any) -> str:
    from sglang.srt.runtime_context import get_device

    device = str(get_device().device)
    return device if device == "cpu" or ":" in device else f"{device}:{manager.kv_args.gpu_id}"
