"""Formats the clocks that differ from the one of this machine, by which times of several hosts are shown."""

from __future__ import annotations

from collections.abc import Mapping

from kvctl.client.clock import ClockOffset
from kvctl.client.names import few, natural_key
from kvctl.render import units

_MOST = 4


def corrections(clocks: Mapping[str, ClockOffset], hosts: Mapping[str, str]) -> str:
    """Formats by how much times were corrected: `n2 +3.1 ms ± 0.2 ms`; "" if no clock is known to differ.

    Args:
        hosts: hosts of these agents; the others are named instead.
    """
    found = {hosts.get(agent) or agent: clock for agent, clock in clocks.items() if clock.correction_ns}
    return few(
        [
            f"{name} {units.offset(found[name].offset_ns)} ± {units.duration(found[name].error_ns)}"
            for name in sorted(found, key=natural_key)
        ],
        _MOST,
        "(kvctl hosts)",
    )
