"""Names of SGLang's ranks: of this one, of the prefill ranks that a decode rank looked up, and of ranks on this host.

A rank is named after its role, its coordinates on the axes of size 2 or more, and its server, as in
`prefill-dp1-tp0@10.0.0.5:30000`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvctl_agent.contract.admin import LOCK_SUFFIX, socket_dir
from kvctl_agent.contract.snapshots import Role


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


def rank_label(role: Role, axes: Mapping[str, tuple[int, int]], tp: int) -> str:
    """Returns the name of a rank within its server; `axes` are the pairs (rank, size) of dp, pp and cp."""
    return f"{role}{''.join(f'-{axis}{rank}' for axis, (rank, size) in axes.items() if size > 1)}-tp{tp}"


def rank_name(role: Role, axes: Mapping[str, tuple[int, int]], tp: int, server: str) -> str:
    """Returns the name of a rank; `axes` as for `rank_label`."""
    return f"{rank_label(role, axes, tp)}@{server}"


def prefill_name(info: Any, host: str, dp: int, pp: int, cp: int, tp: int) -> str:
    """Returns the name that a prefill rank gives itself, from what its bootstrap server says (PrefillServerInfo)."""
    axes = {"dp": (dp, info.dp_size), "pp": (pp, info.pp_size), "cp": (cp, info.attn_cp_size)}
    return rank_name("prefill", axes, tp, f"{host}:{info.prefill_http_port}")


class LocalRanks:
    """Names of the ranks on this host by the endpoint of SGLang's control socket, from the files of their sockets.

    Prefill ranks know of a decode rank only this endpoint. A name once found is kept, also after the rank's end.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name(self, endpoint: str) -> str:
        """Returns the name of the rank with this endpoint; the endpoint itself if it is on another host."""
        found = self._names.get(endpoint)
        if found is None:
            self._read()
            found = self._names.get(endpoint, endpoint)
        return found

    def _read(self) -> None:
        directory: Path = socket_dir()
        for path in directory.glob(f"*{LOCK_SUFFIX}"):
            try:
                lines = path.read_text(encoding="ascii", errors="replace").splitlines()
            except OSError:
                continue
            if len(lines) > 1:
                self._names[lines[1]] = path.name.removesuffix(LOCK_SUFFIX)
