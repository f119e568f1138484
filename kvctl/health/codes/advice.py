"""Gives findings about the ranks of an engine the advice for that engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvctl.health.answers import inner, text
from kvctl.health.codes import sglang, vllm
from kvctl.health.finding import Finding
from kvctl.health.snapshot import Snapshot

# By engine and mode; the ranks of SGLang's plugin in other modes are agents like others.
_ADVICE: Mapping[tuple[str, str], Mapping[str, Callable[[Finding], str]]] = {
    ("sglang", "observe"): sglang.ADVICE,
    ("vllm", "connector"): vllm.ADVICE,
    ("vllm", "observe"): vllm.OBSERVED,
}


def adapted(finding: Finding, snapshot: Snapshot) -> Finding:
    """Returns the finding with the advice for the engine of one of its ranks; otherwise the finding itself."""
    for name in finding.agents:
        if name in snapshot.agents:
            found = inner(snapshot.agents[name].status, "integration")
            advice = _ADVICE.get((text(found, "engine"), text(found, "mode")), {}).get(finding.code)
            if advice is not None:
                return replace(finding, remedy=advice(finding))
    return finding
