"""`kvctl tune`: what it refuses, and a real probe with its advice held against the bench, in a small fleet."""

from __future__ import annotations

import json
from typing import Any

import pytest

SMALL = ("--layers", "2", "--kv-heads", "4", "--head-dim", "32", "--tokens", "64", "--rooms", "8")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--lane", "fast"), "write gbps=40,us=1.2"),
        (("--page-sizes", "16,x"), "write sizes such as 16,64"),
        (("--page-sizes", "0"), "write sizes such as 16,64"),
        (("--transport", "nixl,loopback"), "one at a time"),
        (("--prefill-tp", "3", "--decode-tp", "7"), "3"),
        (("--columns", "speed"), "speed"),
        (("--device", "cuda"), "kvctl bench --device cuda"),
    ],
)
def test_what_is_refused(args: tuple[str, ...], words: str, kvctl: Any) -> None:
    outcome = kvctl("tune", *args)
    assert outcome.code == 2
    assert outcome.out == ""
    assert words in outcome.err


def test_advice_from_a_real_probe_confirmed_by_the_bench(kvctl: Any) -> None:
    outcome = kvctl(
        "tune", *SMALL, "--transport", "loopback", "--prefill-tp", "2", "--decode-dp", "2", "--page-sizes", "16,32",
        "--layer-ms", "1", "--confirm", "-o", "json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    (found,) = json.loads(outcome.out)["data"]
    best, *others = found["options"]
    assert best["recommended"]
    assert not any(other["recommended"] for other in others)
    assert {(each["path"], each["page_size"]) for each in found["options"]} == {
        (path, size) for path in ("slice", "staged") for size in (16, 32)
    }
    assert found["settings"]["path"] == best["path"]
    assert found["lane"]["write_gb_per_s"] > 0
    assert {row["path"] for row in found["confirmed"]} == {"slice", "staged"}
    for row in found["confirmed"]:
        assert row["predicted_rooms_per_s"] > 0
        assert row["measured_rooms_per_s"] > 0
        assert row["rooms_off_ratio"] == pytest.approx(row["predicted_rooms_per_s"] / row["measured_rooms_per_s"] - 1)


def test_every_way_to_share_the_sending_is_considered(kvctl: Any) -> None:
    outcome = kvctl(
        "tune", *SMALL, "--transport", "loopback", "--prefill-cp", "2", "--page-sizes", "16", "-o", "tsv",
        "--columns", "path,cp_mode", "-q",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    modes = {line.split("\t")[1] for line in outcome.out.splitlines()[1:]}
    assert modes == {"rank0", "all", "all-chunk", "room-hash"}
