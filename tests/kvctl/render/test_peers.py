"""The matrix of prefill and decode agents: the state of a pair, and a drawing that fits the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.commands.peers import refusals
from kvctl.render.peers import draw_matrix, pairs


def end(agent: str, peer: str, state: str = "ready", **more: Any) -> dict[str, Any]:
    role = peer.split("-")[0]
    row = {"agent": agent, "peer": peer, "role": role, "state": state, "lane": "shm", "rtt_ns": 1000}
    return {**row, "errors_total": 1, "differences": [], **more}


def roles(*names: str) -> dict[str, str]:
    return {name: name.split("-")[0] for name in names}


def text(rows: Any, width: int) -> list[str]:
    return ["".join(span for span, _ in line).rstrip() for line in draw_matrix(rows, width)]


@pytest.mark.parametrize(
    ("ours", "theirs", "state"),
    [
        ("ready", "ready", "ready"),
        ("ready", "lost", "lost"),
        ("suspect", "lost", "lost"),
        ("refused", "lost", "refused"),
        ("connecting", "ready", "connecting"),
        ("ready", None, "one-sided"),
        (None, "suspect", "suspect"),
        (None, None, "none"),
        ("of a newer release", "ready", "of a newer release"),
    ],
)
def test_a_pair_is_the_worse_of_its_ends(ours: str | None, theirs: str | None, state: str) -> None:
    rows = [end("prefill-0", "decode-0", ours)] if ours else []
    rows += [end("decode-0", "prefill-0", theirs)] if theirs else []
    (pair,) = pairs(roles("prefill-0", "decode-0"), rows)
    assert (pair["state"], pair["prefill_sees"], pair["decode_sees"]) == (state, ours, theirs)
    assert pair["errors_total"] == len(rows)


def test_an_observed_engine_counts_no_errors() -> None:
    (pair,) = pairs(roles("prefill-0", "decode-0"), [end("prefill-0", "decode-0", errors_total=None)])
    assert pair["errors_total"] is None


def test_a_peer_that_cannot_be_asked_is_no_one_sided_link() -> None:
    (pair,) = pairs(roles("prefill-0"), [end("prefill-0", "decode-0")])
    assert pair["state"] == "ready"


def test_every_pair_is_there_once() -> None:
    rows = pairs(roles("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"), [])
    assert len({(row["prefill"], row["decode"]) for row in rows}) == len(rows) == 6


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (16, 16), (16, 64)])
def test_the_picture_fits_and_shows_every_pair(size: tuple[int, int], width: int) -> None:
    names = [f"prefill-{number}" for number in range(size[0])], [f"decode-{number}" for number in range(size[1])]
    rows = [
        end(prefill, decode, "lost" if (p + d) % 5 == 0 else "ready", lane="rdma" if d % 2 else "tcp")
        for p, prefill in enumerate(names[0])
        for d, decode in enumerate(names[1])
    ]
    picture = text(pairs(roles(*names[0], *names[1]), rows), width)
    lines = picture[: max(number for number, line in enumerate(picture) if not line)]  # the legend is below
    grid = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert grid.count("✕") + grid.count("◑") == size[0] * size[1]
    assert grid.count("✕") == sum(row["state"] == "lost" for row in rows)
    assert all(any(line.startswith(name) for line in picture) for name in names[0])


def test_decode_10_comes_after_decode_9() -> None:
    rows = pairs(roles("prefill-0", *(f"decode-{number}" for number in range(11))), [])
    assert text(rows, 80)[1].split() == [str(number) for number in range(11)]


def test_what_does_not_fit_is_written_out() -> None:
    rows = pairs(
        roles("prefill-0", "decode-0"),
        [end("prefill-0", "decode-0", "refused", differences=["page_size 64 ≠ 32", "dtype bf16 ≠ fp8"])],
    )
    assert text(rows, 80)[-1] == "≠ prefill-0 and decode-0: page_size 64 ≠ 32; dtype bf16 ≠ fp8"


def test_nobody_gives_a_line() -> None:
    assert text([], 80) == ["no pair of a prefill and a decode agent"]


FACTOR = ["state.conv 8 rows ≠ 16 rows"]


@pytest.mark.parametrize(
    ("ours", "theirs", "swapped", "values"),
    [
        (FACTOR, [], False, ("8 rows", "16 rows")),
        (FACTOR, FACTOR, True, ("16 rows", "8 rows")),
        (None, FACTOR, False, ("8 rows", "16 rows")),  # reported by the prefill agent
        ([], FACTOR, False, ("16 rows", "8 rows")),  # reported by the decode agent only
        ([], FACTOR, True, ("8 rows", "16 rows")),
    ],
)
def test_each_value_stands_under_its_agent(ours: Any, theirs: Any, swapped: bool, values: tuple[str, str]) -> None:
    def row(differences: Any) -> Any:
        return None if differences is None else {"differences": differences}

    (found,) = refusals(row(ours), row(theirs), swapped)
    assert (found["factor"], found["a"], found["b"]) == ("state.conv", *values)


def test_a_version_is_a_factor_of_two_words() -> None:
    (found,) = refusals({"differences": ["protocol version 3 ≠ 4"]}, None, False)
    assert (found["factor"], found["a"], found["b"]) == ("protocol version", "3", "4")


def test_what_is_no_factor_is_told_as_it_is() -> None:
    (found,) = refusals({"differences": ["its pool does not say pages"]}, None, False)
    assert (found["factor"], found["a"], found["verdict"]) == ("its pool does not say pages", None, "incompatible")
