"""What a preflight makes of ranks that end, hang or answer wrongly: scripts play them, one process for each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvctl.lab.preflight.run import HostName, Options, PlannedRank, Preflight
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.choices import HOST

RANK = f"""
import json, os, sys, time
host, directory = os.environ["RANK_HOST"], os.environ["RANK_DIRECTORY"]
BEGUN = dict(version={VERSION!r}, host=host, pid=os.getpid(), processes=host, boot=host, address=host,
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
Run = Callable[..., Preflight]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a preflight of hosts with a rank each, given the script of each host."""

    def run(prefill: dict[str, str], decode: dict[str, str]) -> Preflight:
        program = tmp_path / "rank.py"
        program.write_text(RANK)
        for host, script in (prefill | decode).items():
            (tmp_path / host).write_text(script)
        ranks = [PlannedRank(host, "prefill", host, HOST, True) for host in prefill]
        ranks += [PlannedRank(host, "decode", host, HOST, True) for host in decode]
        ssh = ("env", "RANK_HOST={host}", f"RANK_DIRECTORY={tmp_path}")
        options = Options("nixl", {}, {}, (), ssh, (sys.executable, str(program)), 5.0)
        pairs = [(one, other) for one in prefill for other in decode]
        hosts = [HostName(rank.host) for rank in ranks]
        with Preflight(hosts, ranks, pairs, options, lambda _: None) as preflight:
            preflight.run()
        return preflight

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
    assert results.failed == {"p": "its process has ended with exit code 1: no memory"}
    assert set(results.clocks) == {"d"}


@pytest.mark.parametrize("line", ["42", "[]", "null", '{"kind": "answer"}', '{"kind": "answer", "data": 1}', "Welcome"])
def test_a_login_that_prints_on_stdout_is_named(line: str, run: Run) -> None:
    results = run({"p": f"print({line!r}, flush=True)\n{USUAL}"}, {"d": USUAL}).results
    assert set(results.failed) == {"p"}
    assert "a login there must print nothing on stdout" in results.failed["p"]


def test_hosts_that_can_listen_on_no_port_are_measured(run: Run) -> None:
    preflight = run({"p": USUAL}, {"d": USUAL})
    assert preflight.results.links == {("p", "d"): [], ("d", "p"): []}
    assert set(preflight.results.writes) == {("p", "d")}
