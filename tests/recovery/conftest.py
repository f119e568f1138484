"""A small fleet of real processes under load, whose ranks the tests of this folder kill, stop and restart."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.lab.demo.fleet import FleetPlan, LiveFleet
from kvctl.lab.demo.traffic import Traffic
from kvctl.lab.ranks.request import Sizes

ROOMS_IN_FLIGHT = 8
PATIENCE_S = 60.0
# Longer than a busy machine keeps a process waiting for a core, or ranks would be given up that nobody stopped.
TIMINGS = {"suspect_s": 0.8, "lost_s": 5.0}


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Override: ranks start and end while the fleet lives; the fleet itself must end well and leave nothing behind."""


@pytest.fixture(autouse=True, scope="module")
def socket_dir() -> Iterator[Path]:
    """One directory for all tests of a module, because they share its fleet."""
    directory = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCTL_SOCKET_DIR", str(directory))
        yield directory
    left = [path.name for path in directory.rglob("*") if path.is_socket()]
    shutil.rmtree(directory)
    assert left == []


@pytest.fixture(scope="module")
def traffic(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Traffic]:
    """Continuous random verified rooms from two prefill ranks to two decode ranks.

    The parameter has the transport, and the sizes of the decode side.
    """
    transport, decode = request.param
    plan = FleetPlan(
        prefill=(Sizes(tp=2),),
        decode=decode,
        transport=transport,
        seed=5,
        concurrency=ROOMS_IN_FLIGHT,
        tokens=(16, 512),
        config=TIMINGS,
    )
    with LiveFleet(plan) as fleet:
        fleet.start()
        load = Traffic(fleet)
        load.until(lambda: load.accounting.done > 0, PATIENCE_S, "a first room succeeds")
        yield load
        told = findings(load)  # by the test in which it happened
        load.drain(PATIENCE_S)
        assert [each for each in findings(load) if each not in told] == []
        load.until(lambda: not kept(load), PATIENCE_S, "no rank keeps anything of a room", quiet=True)
        assert {
            name: usage["strays"] for name, usage in fleet.usage(PATIENCE_S, sweep=True).items() if usage["strays"]
        } == {}
        assert load.accounting.verified_bytes > 0
        assert fleet.close() == {}


def kept(traffic: Traffic) -> list[str]:
    """Returns the ranks that still hold something of a room, after allowing for answers that are under way."""
    return [
        name
        for name, usage in traffic.fleet.usage(PATIENCE_S).items()
        if usage["rooms"] or usage["records"] or usage["ring_used_bytes"] or usage["quarantined_bytes"]
    ]


def findings(traffic: Traffic) -> list[object]:
    """Returns wrong bytes, hanging rooms, and failures and deaths that no injected fault explains."""
    books = traffic.accounting
    return [*books.corrupt, *books.hung, *books.unexpected, *traffic.crashes]


@pytest.fixture(autouse=True)
def as_before(traffic: Traffic) -> Iterator[None]:
    """Check after each test that all ranks serve again without a restart of another rank, and that there are no
    findings.
    """
    lives, found = {name: rank.lives for name, rank in traffic.fleet.ranks.items()}, findings(traffic)
    yield
    ranks = traffic.fleet.ranks
    for name, rank in ranks.items():  # where a test failed half way, the next ones need a whole fleet
        if rank.paused:
            traffic.resume(name)
        elif not rank.running:
            traffic.restart(name)
    traffic.until(lambda: all(rank.serving for rank in ranks.values()), PATIENCE_S, "all ranks serve again")
    done = traffic.accounting.done
    traffic.until(lambda: traffic.accounting.done >= done + 10, PATIENCE_S, "ten more rooms succeed")
    assert [each for each in findings(traffic) if each not in found] == []
    assert sum(rank.lives - lives[name] for name, rank in ranks.items()) <= 1, "only the victim was restarted"
