"""What the registries said, as the admin socket tells it."""

from __future__ import annotations

from kvctl_agent.admin.documents import bootstrap_row
from kvctl_agent.protocol.bootstrap_registry import Rank, Register, Registry, Roster


def rank(*coord: int, sizes: tuple[int, int, int, int] = (1, 2, 1, 2)) -> Rank:
    name = "prefill-" + "".join(map(str, coord))
    return Rank(name, f"tcp://10.0.0.1:{5000 + coord[3]}", 0xC0FFEE, list(coord), list(sizes))


def test_missing_ranks_are_told_by_their_coordinates() -> None:
    registry = Registry()
    registry.answer(Register(rank(0, 0, 0, 1)), 0)
    roster = registry.answer(Register(rank(0, 1, 0, 0)), 0)
    row = bootstrap_row("decode-0", "tcp://a:1", roster)
    assert (row["agent"], row["registry"], row["expected"]) == ("decode-0", "tcp://a:1", 4)
    assert row["sizes"] == {"dp": 1, "pp": 2, "cp": 1, "tp": 2}
    assert [each["name"] for each in row["registered"]] == ["prefill-0001", "prefill-0100"]
    assert row["registered"][0]["incarnation"] == "0000000000c0ffee"
    assert row["missing"] == [{"dp": 0, "pp": 0, "cp": 0, "tp": 0}, {"dp": 0, "pp": 1, "cp": 0, "tp": 1}]
    assert row["text"].startswith("2 of 4 prefill ranks registered")


def test_a_complete_instance_misses_nobody() -> None:
    registry = Registry()
    for pp in range(2):
        for tp in range(2):
            roster = registry.answer(Register(rank(0, pp, 0, tp)), 0)
    row = bootstrap_row("decode-0", "tcp://a:1", roster)
    assert (row["missing"], row["text"], len(row["registered"])) == ([], "", 4)


def test_a_registry_that_knows_nobody_or_nonsense() -> None:
    silent = Roster([], 0, "no answer from the registry at tcp://a:1")
    odd = Roster([Rank("x", "", 1, [0], [0, 1, 1, 1])], 3, "")
    first, second = bootstrap_row("decode-0", "tcp://a:1", silent), bootstrap_row("decode-0", "tcp://b:1", odd)
    assert (first["expected"], first["sizes"], first["registered"], first["missing"]) == (None, None, [], [])
    assert (second["sizes"], second["missing"], len(second["registered"])) == (None, [], 1)


def test_of_a_huge_instance_some_of_the_missing_are_told() -> None:
    roster = Registry().answer(Register(rank(0, 0, 0, 0, sizes=(64, 1, 1, 64))), 0)
    row = bootstrap_row("decode-0", "tcp://a:1", roster)
    assert (row["expected"], len(row["missing"])) == (4096, 256)
