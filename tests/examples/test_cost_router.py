"""examples/cost_router.py: its choices, and that they are sooner transferred than by round robin, in real processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.cost_router import CostRouter

EXAMPLE = Path(__file__).parents[2] / "examples" / "cost_router.py"
MS = 1_000_000


class Answering:
    """An agent with a fixed answer, which may be changed."""

    def __init__(self, **answer: Any) -> None:
        self.answer = answer
        self.asked = 0

    def ask(self, command: str, **args: Any) -> Any:
        assert command == "cost"
        self.asked += 1
        return self.answer


def cost(peer: str, fixed_ms: float | None, mb_per_s: float = 1.0, samples: int = 9, **changes: Any) -> dict[str, Any]:
    fixed = None if fixed_ms is None else fixed_ms * MS
    rate = None if fixed is None else mb_per_s * 1e6
    known = {"peer": peer, "state": "ready", "samples": samples, "fixed_ns": fixed, "bytes_per_s": rate}
    return {**known, "bytes_per_token": 1000.0, **changes}


def router(*costs: dict[str, Any], ahead_ns: int = 0, draining: str = "") -> CostRouter:
    prefill: Any = Answering(costs=list(costs), ahead_ns=ahead_ns)
    decode: Any = {each["peer"]: Answering(accepting=each["peer"] != draining) for each in costs}
    return CostRouter(prefill, decode)


def test_the_size_of_the_prompt_decides() -> None:
    made = router(cost("near", 1, mb_per_s=1), cost("far", 50, mb_per_s=10))
    assert made.choose(16) == "near"
    assert made.choose(1000) == "far"
    assert made.predicted_ns("far", 1000) == 150 * MS


def test_rooms_in_transfer_delay_the_next() -> None:
    made = router(cost("a", 2), ahead_ns=30 * MS)
    made.refresh()
    assert made.predicted_ns("a", 10) == (2 + 10 + 30) * MS


def test_pairs_are_left_out_that_are_not_ready_or_drain() -> None:
    assert router(cost("a", 1, state="suspect"), cost("b", 9)).choose(1) == "b"
    assert router(cost("a", 1), cost("b", 9), draining="a").choose(1) == "b"
    with pytest.raises(LookupError, match="no decode rank is connected and accepts rooms"):
        router(cost("a", 1, state="lost")).choose(1)


def test_new_pairs_are_measured_first_and_unknown_ones_are_not_slow() -> None:
    made = router(cost("a", 1), cost("b", None, samples=0), cost("c", None, samples=3))
    assert {made.choose(1) for _ in range(4)} == {"b", "c"}
    assert router(cost("a", 5), cost("b", None), cost("c", 1)).choose(1) == "c"


def test_prompts_do_not_ask_one_by_one() -> None:
    prefill: Any = Answering(costs=[cost("a", 1)], ahead_ns=0)
    made = CostRouter(prefill, {"a": Answering(accepting=True)})  # type: ignore[dict-item]
    for _ in range(100):
        made.choose(1)
    assert prefill.asked < 100


def test_by_cost_is_sooner_than_round_robin() -> None:
    command = [sys.executable, str(EXAMPLE), "--prompts", "16", "--late-ms", "400", "--transport", "loopback"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = re.findall(r"^(.+?) +mean +([\d.]+) ms +(\d+) to \S+, (\d+) to \S+$", ran.stdout, re.MULTILINE)
    (robin, robin_ms, *_), (by_cost, cost_ms, fast, slow) = lines
    assert (robin, by_cost) == ("round robin", "by cost")
    assert float(cost_ms) < float(robin_ms)
    assert int(fast) > int(slow)
