"""What a preflight makes of ranks that end, hang or answer wrongly: scripts play them, one process for each rank."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvctl.lab.preflight import run as run_module
from kvctl.lab.preflight.judge import pair_rows
from kvctl.lab.preflight.run import Options, PlannedRank, Preflight, Results
from kvctl.lab.ranks.request import Role
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.choices import HOST

RANK = f"""
import json, os, sys, time
host, directory = os.environ["RANK_HOST"], os.environ["RANK_DIRECTORY"]
BEGUN = dict(version={VERSION!r}, host=host, pid=os.getpid(), processes=host, address=host,
    ports=[], ports_refused={{}}, metadata="", addr=0, nbytes=64, device=-1, transport={{}}, facts=[], devices={{}})
WRITTEN = dict(error="", crc32=1, nbytes=64, gb_per_s=1.0, latency_ns=1, first_ns=1, moved_bytes=64, before=[],
    after=[])

def commands():
    for line in sys.stdin:
        message = json.loads(line)
        yield message["do"], message["args"]

def answer(data):
    print(json.dumps(dict(kind="answer", data=data)), flush=True)

def usual(do, args):
    answer(dict(begin=BEGUN, clock=dict(now_ns=time.time_ns()), reach=dict(ports=[]), expect={{}}, write=WRITTEN,
        check=dict(crc32=1), devices={{}})[do])

exec(open(f"{{directory}}/{{host}}").read())
"""
USUAL = "for do, args in commands(): usual(do, args)"
Run = Callable[..., "Outcome"]


class Outcome(NamedTuple):
    """Results of a preflight, and its rows by (prefill rank, decode rank)."""

    results: Results
    rows: dict[tuple[str, str], dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a preflight of hosts with equal numbers of ranks, given the script of the ranks of each host."""

    def run(prefill: dict[str, str], decode: dict[str, str], count: int = 1, again: bool = False) -> Outcome:
        program = tmp_path / "rank.py"
        program.write_text(RANK)
        ranks: list[PlannedRank] = []
        of_role: dict[str, list[str]] = {"prefill": [], "decode": []}
        roles: tuple[Role, ...] = "prefill", "decode"
        for role, scripts in zip(roles, (prefill, decode), strict=True):
            for host, script in scripts.items():
                (tmp_path / host).write_text(script)
                for number in range(count):
                    name = f"{host}-{number}" if count > 1 else host
                    ranks.append(PlannedRank(name, role, host, HOST, not number))
                    of_role[role].append(name)
        ssh = ("env", "RANK_HOST={host}", f"RANK_DIRECTORY={tmp_path}")
        options = Options("nixl", {}, {}, (), ssh, (sys.executable, str(program)), 5.0)
        pairs = [(one, other) for one in of_role["prefill"] for other in of_role["decode"]]
        with Preflight(dict.fromkeys((*prefill, *decode), ""), ranks, pairs, options, lambda _: None) as preflight:
            preflight.run()
            if again:
                preflight.measure(pairs)
        rows = pair_rows(ranks, pairs, preflight.results)
        return Outcome(preflight.results, {(row["prefill"], row["decode"]): row for row in rows})

    return run


def test_a_rank_that_ends_after_its_answer_has_failed_at_the_next_command(run: Run) -> None:
    ends = """
for do, args in commands():
    with open(f"{directory}/pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{directory}/pid.new", f"{directory}/pid")
    usual(do, args)
    sys.exit("no memory")
"""
    # Answers once the client has seen the end of the other.
    waits = (
        """
while not os.path.exists(f"{directory}/pid") or os.path.exists(f"/proc/{open(f'{directory}/pid').read()}"):
    time.sleep(0.01)
"""
        + USUAL
    )
    results = run({"p": ends}, {"d": waits}).results
    assert results.failed == {"p": "its process has ended with exit code 1; its last output: no memory"}
    assert set(results.clocks) == {"d"}


@pytest.mark.parametrize("line", ["42", "[]", "null", '{"kind": "answer"}', '{"kind": "answer", "data": 1}', "Welcome"])
def test_a_login_that_prints_on_stdout_is_named(line: str, run: Run) -> None:
    results = run({"p": f"print({line!r}, flush=True)\n{USUAL}"}, {"d": USUAL}).results
    assert set(results.failed) == {"p"}
    assert "a login there must print nothing on stdout" in results.failed["p"]


def test_hosts_that_can_listen_on_no_port_are_measured(run: Run) -> None:
    outcome = run({"p": USUAL}, {"d": USUAL})
    assert outcome.results.links == {("p", "d"): [], ("d", "p"): []}
    assert outcome.rows["p", "d"]["verdict"] == "ok"


def test_what_a_failed_engine_said_last_is_named(run: Run) -> None:
    fails = """
print("UCX  ERROR no such device", file=sys.stderr, flush=True)
print(json.dumps(dict(kind="fatal", data=dict(code="TransportError", message="it cannot be opened"))), flush=True)
"""
    results = run({"p": fails}, {"d": USUAL}).results
    assert results.failed["p"] == "it cannot be opened (TransportError); its last output: UCX  ERROR no such device"


def test_ranks_without_commands_are_kept_alive(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(run_module, "START_S", 30.0)
    idle = """
for do, args in commands():
    if do == "keep_alive":
        open(f"{directory}/alive", "w").close()
    else:
        usual(do, args)
"""
    busy = """
while not os.path.exists(f"{directory}/alive"):
    time.sleep(0.01)
for do, args in commands():
    if do != "keep_alive":
        usual(do, args)
"""
    outcome = run({"p": idle}, {"d": busy})
    assert outcome.results.failed == {}
    assert outcome.rows["p", "d"]["verdict"] == "ok"


def test_a_rank_that_hears_nothing_ends() -> None:
    code = """
import sys
from kvctl.lab.preflight import __main__ as rank
rank.SILENCE_S = 0.5
sys.exit(rank.main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as rank:
        assert rank.wait(60.0) != 0  # its standard input stays open


def test_pairs_of_blocked_hosts_are_left_out_after_two(run: Run) -> None:
    blocked = """
for do, args in commands():
    if do == "write" and host.startswith("p"):
        answer(WRITTEN | dict(error="no way", crc32=None, nbytes=0))
    else:
        usual(do, args)
"""
    outcome = run({"p": blocked}, {"d": USUAL}, 3)
    assert len(outcome.results.writes) == 2
    assert {row["verdict"] for row in outcome.rows.values()} == {"critical"}
    problems = [row["problem"] for row in outcome.rows.values()]
    assert sum(each.startswith("not measured, because p-0 → d-0") for each in problems) == 7


@pytest.mark.parametrize(("wrong", "verdict"), [(1, "ok"), (2, "critical")])
def test_bytes_that_may_be_those_of_an_earlier_write_are_compared_again(wrong: int, verdict: str, run: Run) -> None:
    late = """
for do, args in commands():
    if do == "write":
        answer(WRITTEN | dict(error="a write was not complete", crc32=None, nbytes=0))
    else:
        usual(do, args)
"""
    decode = f"""
checks = 0
for do, args in commands():
    checks += do == "check"
    if do == "check":
        answer(dict(crc32=1 if checks > 1 + {wrong} else 2))
    else:
        usual(do, args)
"""
    outcome = run({"late": late, "next": USUAL}, {"d": decode})
    assert (outcome.rows["late", "d"]["verdict"], outcome.rows["next", "d"]["verdict"]) == ("critical", verdict)
    assert outcome.results.writes["next", "d"]["wrong_bytes"] == (verdict == "critical")


def test_a_preflight_has_no_temporary_directory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/missing")
    outcome = run({"p": USUAL}, {"d": USUAL})
    assert outcome.rows["p", "d"]["verdict"] == "ok"


@pytest.mark.parametrize(("first", "second"), [((4.0, 9), (2.0, 3)), ((2.0, 3), (4.0, 9))])
def test_of_two_measurements_the_best_of_each_counts(
    first: tuple[float, int], second: tuple[float, int], run: Run
) -> None:
    varies = f"""
found = [{first}, {second}]
for do, args in commands():
    if do == "write":
        rate, latency = found.pop(0)
        answer(WRITTEN | dict(gb_per_s=rate, latency_ns=latency))
    else:
        usual(do, args)
"""
    row = run({"p": varies}, {"d": USUAL}, again=True).rows["p", "d"]
    assert (row["gb_per_s"], row["latency_ns"]) == (4.0, 3)
