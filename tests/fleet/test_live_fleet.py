"""A real fleet under traffic whose ranks are killed, paused, restarted, bothered: it goes on, and every byte is right.

Few and short, since every one of them starts processes; `make soak` does the same for as long as you like.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.demo.fault_schedule import ScheduledFault
from kvctl.lab.demo.fleet import FleetPlan, LiveFleet
from kvctl.lab.demo.traffic import Traffic, TrafficOptions
from kvctl.lab.ranks.group import FleetError
from kvctl.lab.ranks.messages import Abort
from kvctl.lab.ranks.request import Sizes
from kvctl_agent.contract.admin import socket_dir
from tests.support.soak.run import Soak, main
from tests.support.socket_noise import SocketNoise, listeners

# Far more than it takes on a machine that does nothing else.
PATIENCE_S = 60.0


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def served_again(traffic: Traffic, name: str) -> None:
    traffic.until(lambda: name in traffic.first_success_ns, PATIENCE_S, f"a room succeeds at {name} again")


def test_it_outlives_deaths_pauses_and_noise_and_nothing_is_wrong_or_left() -> None:
    plan = FleetPlan(seed=5, concurrency=8, tokens=(16, 512))
    with LiveFleet(plan) as fleet:
        fleet.start()
        pids = [rank.pid for rank in fleet.ranks.values()]
        traffic = Traffic(fleet, TrafficOptions(aborts=0.1))
        books = traffic.accounting
        traffic.until(lambda: books.done >= 30, PATIENCE_S, "30 rooms are done")

        noise = SocketNoise(5)
        for rank in fleet.ranks.values():
            assert noise.make(rank.pid) >= 1
        noise.close()
        paths = {Path(listener.path).name for rank in fleet.ranks.values() for listener in listeners(rank.pid)}
        assert {"bootstrap-0", "decode-1.sock"} <= paths

        traffic.kill("decode-1")
        traffic.until(lambda: not fleet.ranks["decode-1"].running, PATIENCE_S, "decode-1 is seen to be gone")
        done = books.done
        traffic.until(lambda: books.done >= done + 10, PATIENCE_S, "the other decode rank goes on")
        traffic.restart("decode-1", faults="clock-jump=-1h")
        served_again(traffic, "decode-1")

        traffic.pause("decode-0")
        done = books.done
        traffic.until(lambda: books.done >= done + 10, PATIENCE_S, "the other decode rank goes on")
        traffic.resume("decode-0")

        traffic.fault("decode-0", "control-loss=10%,notify-loss=20%", 2.0)
        traffic.kill("prefill-0")  # the registry is in it
        traffic.until(lambda: not fleet.ranks["prefill-0"].running, PATIENCE_S, "prefill-0 is seen to be gone")
        traffic.restart("prefill-0")
        served_again(traffic, "prefill-0")
        everybody = fleet.ranks.values()  # decode-0 loses messages still, and may meet the new life later
        traffic.until(lambda: all(rank.serving for rank in everybody), PATIENCE_S, "all ranks serve")
        traffic.drain(plan.patience_s + PATIENCE_S)

        assert books.done > 50
        assert books.causes["ABORTED"] > 0
        assert (books.hung, books.corrupt, books.unexpected, traffic.crashes) == ([], [], [], [])
        assert books.failed == books.expected
        assert books.verified_bytes > 0
        usage = fleet.usage(PATIENCE_S, sweep=True)
        assert usage.keys() == fleet.ranks.keys()
        assert [each["strays"] for each in usage.values()] == [[]] * 4
        empty = [0] * 4
        traffic.until(
            lambda: [each["rooms"] for each in fleet.usage(PATIENCE_S).values()] == empty,
            PATIENCE_S,
            "no room is left",
            quiet=True,
        )
        pids += [rank.pid for rank in fleet.ranks.values()]
        directory = fleet.directory
    assert all(map(gone, pids))
    assert not directory.exists()
    assert list(socket_dir().iterdir()) == []


def test_a_frozen_rank_is_replaced_and_the_pages_it_may_write_to_are_free_once_it_goes_on() -> None:
    plan = FleetPlan(seed=6, concurrency=8, tokens=(16, 512), transport="loopback")
    with LiveFleet(plan) as fleet:
        fleet.start()
        traffic, rank = Traffic(fleet), fleet.ranks["prefill-1"]
        books = traffic.accounting
        traffic.until(lambda: books.done >= 20, PATIENCE_S, "20 rooms are done")
        with pytest.raises(ValueError, match="prefill-1 cannot be replaced"):
            fleet.replace("prefill-1")  # it is not paused
        traffic.pause("prefill-1")
        room = traffic.open(512)
        traffic.until(lambda: "decode-0" in room.ends, PATIENCE_S, "decode-0 gives the room up")
        frozen = rank.pid
        traffic.replace("prefill-1")
        served_again(traffic, "prefill-1")
        done = books.done
        traffic.until(lambda: books.done >= done + 20, PATIENCE_S, "the replacement serves")
        assert rank.replaced is not None
        assert (rank.replaced.pid, rank.pid != frozen) == (frozen, True)
        assert room.expects == {"decode-0"}  # the frozen process may still write to its pages

        traffic.resume_replaced("prefill-1")
        traffic.until(lambda: room.over, PATIENCE_S, "the process that was frozen lets go of the room")
        done = books.done
        traffic.until(lambda: books.done >= done + 20, PATIENCE_S, "the replacement goes on serving")
        traffic.end_replaced("prefill-1", kill=False)
        traffic.until(lambda: gone(frozen), PATIENCE_S, "the process that was frozen has ended")
        traffic.drain(plan.patience_s + PATIENCE_S)
        assert (books.hung, books.corrupt, books.unexpected, traffic.crashes) == ([], [], [], [])
        assert books.failed == books.expected > 0
        assert [each["strays"] for each in fleet.usage(PATIENCE_S, sweep=True).values()] == [[]] * 4
    assert list(socket_dir().iterdir()) == []


def test_a_soak_that_ends_while_a_replaced_process_is_frozen_lets_it_go_on_and_leaves_nothing() -> None:
    plan = FleetPlan(seed=7, concurrency=8, tokens=(16, 512))
    with LiveFleet(plan) as fleet:
        fleet.start()
        soak = Soak(fleet, TrafficOptions(), [ScheduledFault(0.5, "replace", "prefill-1", 20.0)])
        rank = fleet.ranks["prefill-1"]
        soak.traffic.until(lambda: rank.replaced is not None, PATIENCE_S, "prefill-1 is replaced")
        former = rank.replaced
        assert former is not None
        soak.drain()
        summary = soak.summary()
        assert summary["findings"] == []
        assert summary["faults"]["injected"] == {"replace": 1}
        assert (summary["restarts"]["count"], summary["restarts"]["cut_short"]) == (1, 0)
        assert rank.lives == 2
    assert gone(former.pid)
    assert list(socket_dir().iterdir()) == []


def test_a_failure_that_nobody_asked_for_is_a_finding_and_what_is_known_of_it_is_kept(tmp_path: Path) -> None:
    plan = FleetPlan(prefill=(Sizes(),), decode=Sizes(), transport="loopback", concurrency=2, tokens=(64, 64))
    with LiveFleet(plan) as fleet:
        fleet.start()
        soak = Soak(fleet, TrafficOptions(), [], evidence=tmp_path / "evidence")
        lines: list[dict[str, Any]] = []
        soak.run(1.5, lines.append)
        room = soak.traffic.open(64)
        fleet.send("decode-0", Abort(room.number, "behind the ledger's back"))
        soak.drain()
        summary = soak.summary()
    (finding,) = summary["findings"]
    assert finding.startswith(f"unexpected: room {room.number} of 64 tokens")
    assert "decode-0: behind the ledger's back (ABORTED)" in finding
    assert len(lines) == 1
    assert (tmp_path / "evidence" / "finding-1.kvrec").stat().st_size > 0


@pytest.mark.sample
def test_a_rank_that_does_not_come_up_is_named_with_what_it_said() -> None:
    plan = FleetPlan(prefill=(Sizes(),), decode=Sizes(), transport="loopback", config={"lost_s": 0.3, "suspect_s": 0.5})
    with LiveFleet(plan) as fleet, pytest.raises(FleetError, match=r'rank "[a-z]+-0" did not come up: .*lost_s'):
        fleet.start()


@pytest.mark.sample
def test_a_soak_prints_a_summary(capsys: Any) -> None:
    few = ["--transport", "loopback", "--prefill-instances", "tp1", "--decode-dp", "1", "--minutes", "0.05"]
    assert main([*few, "--seed", "3", "--fault", "control-dup=10%"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["seed"], summary["findings"]) == (3, [])
    assert summary["rooms"]["done"] > 0
    assert summary["rooms"]["failed_expected"] == summary["causes"].get("ABORTED", 0)
    assert summary["faults"]["struck"]["control-dup"] > 0


@pytest.mark.sample
def test_an_interrupted_demo_leaves_nothing() -> None:
    demo = [sys.executable, "-m", "kvctl", "demo", "--transport", "loopback", "--prefill-tp", "1", "--decode-dp", "1"]
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        running = subprocess.Popen([*demo, "-o", "tsv"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert running.stdout is not None
        with running.stdout:
            header, first = running.stdout.readline(), running.stdout.readline()
            assert header.startswith("elapsed_ns\trooms_per_s")
            assert len(first.split("\t")) == len(header.split("\t"))
            running.send_signal(number)
            try:
                running.communicate(timeout=PATIENCE_S)
            finally:
                running.kill()
        assert running.wait(PATIENCE_S) == status
        assert list(socket_dir().iterdir()) == []
