"""A bench of servers that are stand-ins: which side is measured when, and what the rows say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.bench import sglang_bench
from kvctl.lab.bench.sglang_bench import ServerBench, load_text
from kvctl.lab.bench.sglang_pairs import Generated, Pair, ServerPlan, parse_sides
from kvctl.lab.bench.sglang_servers import ServerError, Tokens
from kvctl.lab.bench.sglang_views import SERVERS, blocks
from kvctl.lab.ranks.request import Load, Sizes
from kvctl.lab.ranks.request import Tokens as Lengths
from kvctl.render.data import tsv

LOADS = (Load(1, Lengths((64,))), Load(2, Lengths((8, 16))))


class StandIn(Pair):
    """A pair that generates at once: `ms` after the start, the last tokens of the prompt."""

    def __init__(
        self, side: str, folder: Path, log: list[str], ms: float = 10.0, plan: ServerPlan | None = None
    ) -> None:
        super().__init__(parse_sides(side)[0], plan or ServerPlan("m"), folder / side)
        self.log = log
        self.ms = ms
        self.wrong = False
        self.fails: Callable[[Tokens], bool] = lambda prompt: False

    def generate(self, prompt: Tokens, new_tokens: int) -> Generated:
        if self.fails(prompt):
            raise ServerError("decode: no answer")
        self.log.append(self.side.text)
        tokens = [*prompt, *range(new_tokens)][-new_tokens:]
        return Generated([-1, *tokens[1:]] if self.wrong else tokens, self.ms / 1e3, 0.002)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.lab.bench.sglang_servers.Process.start", lambda self: None)
    monkeypatch.setattr("kvctl.lab.bench.sglang_servers.Process.check", lambda self: None)
    monkeypatch.setattr(sglang_bench, "wait_ready", lambda processes, say: say("ready"))


def bench_of(pairs: Sequence[Pair], rounds: int = 2, check: bool = True, said: list[str] | None = None) -> ServerBench:
    say = (said if said is not None else []).append
    return ServerBench(pairs, LOADS, rounds, 4, 7, say, lambda: None, requests=4, check=check)


def turns(log: Sequence[str]) -> list[str]:
    """The sides in the order in which they were measured."""
    return [side for number, side in enumerate(log) if number == 0 or log[number - 1] != side]


def test_sides_that_run_together_take_turns(tmp_path: Path) -> None:
    log: list[str] = []
    bench_of([StandIn(side, tmp_path, log) for side in ("nixl", "kvctl")], check=False).run(all_at_once=True)
    # Warm-up of each; a round of both loads; and a round in the other order.
    warm_up, there, back = ["nixl", "kvctl"], ["nixl", "kvctl"] * 2, ["kvctl", "nixl"] * 2
    assert turns(log) == turns([*warm_up, *there, *back])


def test_sides_run_one_after_another(tmp_path: Path) -> None:
    log: list[str] = []
    bench_of([StandIn(side, tmp_path, log) for side in ("undivided", "nixl", "kvctl")]).run(all_at_once=False)
    assert turns(log) == ["undivided", "nixl", "kvctl"]


def test_rows_have_medians_changes_and_the_overhead(tmp_path: Path) -> None:
    times = {"undivided": 10.0, "nixl": 20.0, "kvctl": 15.0}
    bench = bench_of([StandIn(side, tmp_path, [], ms) for side, ms in times.items()], rounds=4)
    bench.run(all_at_once=True)
    rows = bench.rows()
    assert [row["side"] for row in rows] == [*times, *times]
    alone, first, second = rows[:3]
    assert (first["ttft_ms"]["mean"], second["ttft_ms"]["p99"]) == pytest.approx((20.0, 15.0))
    assert second["ttft_delta_ratio"] == pytest.approx(-0.25)
    assert second["ttft_delta_significant"] is True
    assert [row["ttft_delta_ratio"] for row in (alone, first)] == [None, None]
    assert [row["overhead_ratio"] for row in rows[:3]] == [None, pytest.approx(1.0), pytest.approx(0.5)]
    assert second["tpot_ms"]["mean"] == pytest.approx(2.0)
    assert (second["tokens"], second["rooms"], len(second["rounds"])) == (64, 16, 4)
    assert rows[3]["tokens_drawn"] == "8,16"
    assert bench.problems() == []
    assert all(row["verified"] for row in rows)


def test_a_side_with_other_tokens_is_named(tmp_path: Path) -> None:
    pairs = [StandIn(side, tmp_path, []) for side in ("undivided", "nixl", "kvctl")]
    pairs[2].wrong = True
    bench = bench_of(pairs)
    bench.run(all_at_once=True)
    assert bench.problems() == ["kvctl: tokens differ from those of undivided after prompts of 1, 15, 17, 64 tokens"]
    assert [row["verified"] for row in bench.rows()[:3]] == [True, True, False]


def test_unlike_sizes_on_gpus_are_compared_with_the_first_side(tmp_path: Path) -> None:
    plan = ServerPlan("m", prefill=Sizes(tp=2), prefill_gpus=(0, 1), decode_gpus=(2,))
    pairs = [StandIn(side, tmp_path, [], plan=plan) for side in ("undivided", "nixl", "kvctl")]
    pairs[0].wrong = True
    bench = bench_of(pairs)
    bench.run(all_at_once=True)
    reference = bench.reference()
    assert reference is not None
    assert reference.pair is pairs[1]
    assert bench.problems() == []
    assert [row["verified"] for row in bench.rows()[:3]] == [None, True, True]


def test_a_side_that_fails_leaves_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    pairs = [StandIn(side, tmp_path, []) for side in ("nixl", "kvctl")]
    pairs[0].fails = lambda prompt: len(prompt) == 64
    bench = bench_of(pairs, said=said)
    bench.run(all_at_once=True)
    assert bench.problems() == ["nixl: decode: no answer"]
    assert [row["side"] for row in bench.rows()] == ["kvctl", "kvctl"]
    assert "nixl: failed: decode: no answer" in said


def test_servers_that_do_not_start_are_noted_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(processes: Any, say: Any) -> None:
        if any("nixl" in str(process.log) for process in processes):
            raise ServerError("decode ended with 1\n--- the end of decode.log")

    ended: list[Path] = []
    monkeypatch.setattr(sglang_bench, "wait_ready", dies)
    monkeypatch.setattr("kvctl.lab.bench.sglang_servers.Process.end", lambda self: ended.append(self.log))
    bench = bench_of([StandIn(side, tmp_path, []) for side in ("nixl", "kvctl")])
    bench.run(all_at_once=False)
    assert bench.problems() == ["nixl: decode ended with 1\n--- the end of decode.log"]
    assert len(ended) == 4
    assert {row["side"] for row in bench.rows()} == {"kvctl"}


def test_an_undivided_server_that_does_not_start_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(processes: Any, say: Any) -> None:
        raise ServerError("server ended with 2")

    started: list[Path] = []
    monkeypatch.setattr(sglang_bench, "wait_ready", dies)
    monkeypatch.setattr("kvctl.lab.bench.sglang_servers.Process.start", lambda self: started.append(self.log))
    bench = bench_of([StandIn(side, tmp_path, []) for side in ("undivided", "nixl", "kvctl")])
    bench.run(all_at_once=False)
    assert [log.name for log in started] == ["server.log"]
    undivided, *others = bench.problems()
    assert undivided == "undivided: server ended with 2"
    assert [line.partition(":")[0] for line in others] == ["nixl", "kvctl"]
    assert all("not started: the undivided server" in line for line in others)


def test_all_sides_get_the_same_prompts_and_no_prompt_twice(tmp_path: Path) -> None:
    prompts: dict[str, list[tuple[int, ...]]] = {"nixl": [], "kvctl": []}
    pairs = [StandIn(side, tmp_path, []) for side in prompts]
    for pair in pairs:
        pair.fails = lambda prompt, to=prompts[pair.side.text]: to.append(tuple(prompt)) or False  # type: ignore[misc]
    bench_of(pairs, check=False).run(all_at_once=True)
    first, second = ({*each} for each in prompts.values())
    assert first == second
    assert len(prompts["nixl"]) == len(first) == 1 + 2 + 2 * (4 + 4)


def test_the_terminal_shows_every_side(tmp_path: Path) -> None:
    bench = bench_of([StandIn(side, tmp_path, []) for side in ("undivided", "nixl", "kvctl")], rounds=1)
    bench.run(all_at_once=True)
    rows = bench.rows()
    document = {
        "sides": ["undivided", "nixl", "kvctl"],
        "turns": True,
        "verified": True,
        "shape": {"model": "a model"},
        "floors": {"write_gb_per_s_by_transport": {}},
        "runs": rows,
        "env": {"sglang": "0.5.23"},
    }
    head, table, foot = blocks(rows, document)
    assert "prefill tp1 → decode tp1 of SGLang 0.5.23 · a model" in str(head)
    assert "all sides in the table generated the same tokens" in str(foot)
    assert "Δ of one round" in str(foot)
    assert table.view is SERVERS
    lines = tsv(SERVERS.columns, rows).splitlines()
    assert [line.split("\t")[0] for line in lines] == ["side", *(["undivided", "nixl", "kvctl"] * 2)]


def test_loads_are_named() -> None:
    assert [load_text(load) for load in LOADS] == ["64 tokens, 1 at a time", "8,16 tokens, 2 at a time"]
    assert load_text(Load(16, Lengths((8192,)))) == "8,192 tokens, 16 at a time"


def test_lengths_of_a_range_are_drawn(tmp_path: Path) -> None:
    log: list[int] = []
    pair = StandIn("nixl", tmp_path, [])
    pair.fails = lambda prompt: bool(log.append(len(prompt)))  # type: ignore[func-returns-value]
    load = Load(1, Lengths(low=10, high=12))
    ServerBench([pair], [load], 1, 4, 7, lambda text: None, lambda: None, 60, check=False).run(all_at_once=False)
    assert {*log} == {10, 11, 12}
