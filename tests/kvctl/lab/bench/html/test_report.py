"""The whole page: from a saved document to one self-contained file."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from kvctl.lab.bench.html import report

EVIL = "<script>alert('x')</script>\"&\x1b[31m\u202e\ud800"


def render(data: dict[str, Any]) -> str:
    rest = {"command": "kvctl bench", "started_at": "", **data}
    return report.render(**rest)


@pytest.fixture
def whole(document: dict[str, Any]) -> dict[str, Any]:
    """Everything that a report can show."""
    for run in document["runs"]:
        run["hidden_ms"] = {"mean": 3.0}
    return {
        "document": document,
        "command": "kvctl bench --sweep concurrency=1,2,4",
        "started_at": "2026-11-20 12:52 UTC",
    }


@pytest.fixture
def compared(document: dict[str, Any]) -> dict[str, Any]:
    """The document, with four rounds of each run that tell all runs of a load apart."""
    for run in document["runs"]:
        figures = {"latency_ms": run["latency_ms"], "ttft_ms": run["ttft_ms"], "rooms_per_s": run["rooms_per_s"]}
        run["rounds"] = [{**figures, "gb_per_s": run["gb_per_s"] * (1 + off / 1e6)} for off in range(4)]
        run["delta_significant"] = run["delta_ratio"] is not None or None
    return document


def headings(page: str) -> list[str]:
    return [heading.text or "" for heading in ET.fromstring(page).iter("h2")]


def text_of(page: str) -> str:
    return " ".join("".join(ET.fromstring(page).find("body").itertext()).split())  # type: ignore[union-attr]


def table(page: str) -> list[dict[str, str]]:
    found = next(ET.fromstring(page).iter("table"))
    names = ["".join(cell.itertext()) for cell in found.iter("th")]
    return [dict(zip(names, ("".join(cell.itertext()) for cell in row), strict=True)) for row in found.find("tbody")]  # type: ignore[union-attr]


class TestPage:
    def test_a_saved_document_alone_is_enough(self, document: dict[str, Any]) -> None:
        page = render({"document": document})
        assert headings(page) == [
            "Results",
            "Throughput",
            "Latency",
            "Time to first token",
            "Where a part's time goes",
            "How it was measured",
        ]
        assert "KV-cache transfer of llama-3.1-8b over nixl" in text_of(page)
        assert "✓ every byte verified" in text_of(page)

    def test_everything_has_its_place(self, whole: dict[str, Any]) -> None:
        page = render(whole)
        assert headings(page) == [
            "Results",
            "Throughput",
            "Latency",
            "Time to first token",
            "Exposed and hidden transfer",
            "Where a part's time goes",
            "How it was measured",
        ]
        assert ET.fromstring(page).findtext("./head/title") == "KV-cache transfer of llama-3.1-8b over nixl"
        assert "kvctl bench --sweep concurrency=1,2,4" in text_of(page)

    def test_it_refers_to_nothing_outside(self, whole: dict[str, Any]) -> None:
        page = render(whole)
        assert not re.search(r"https?:|//[a-z]|\bsrc=|\bhref=|url\(|@import|<link|<script|<iframe|\bon[a-z]+=", page)

    def test_it_is_well_formed_with_every_colour_in_its_style_sheet(self, whole: dict[str, Any]) -> None:
        page = ET.fromstring(render(whole))
        style = page.findtext("./head/style") or ""
        assert "prefers-color-scheme: dark" in style
        assert set(re.findall(r"var\((--[a-z0-9-]+)\)", style)) <= set(re.findall(r"(--[a-z0-9-]+):", style))
        classes = {word for each in page.iter() for word in each.get("class", "").split()}
        inside = {word for svg in page.iter("svg") for each in svg.iter() for word in each.get("class", "").split()}
        assert {word for word in classes - inside - {"number", "cards"} if f".{word}" not in style} == set()
        used = {
            name
            for each in page.iter()
            for value in each.attrib.values()
            for name in re.findall(r"var\((.*?)\)", value)
        }
        assert used <= set(re.findall(r"(--[a-z0-9-]+):", style))

    @pytest.mark.parametrize("verified", [True, False, None])
    def test_the_verdict_leaves_no_doubt(self, document: dict[str, Any], verified: bool | None) -> None:
        words = {True: "✓ every byte verified", False: "✗ NOT verified, 3 rooms failed", None: "nothing was verified"}
        document["runs"][0]["failed"] = 3
        text = text_of(render({"document": {**document, "verified": verified}}))
        assert [word for word in words.values() if word in text] == [words[verified]]

    def test_key_figures(self, document: dict[str, Any]) -> None:
        text = text_of(render({"document": document}))
        assert "2.99 GB/s" in text
        assert "24.2 %of one memcpy 12.3 GB/s" in text
        assert "auto against slice" not in text  # a result without rounds does not tell settings apart

    def test_the_speedup_is_one_that_the_rounds_show(self, compared: dict[str, Any]) -> None:
        text = text_of(render({"document": compared}))
        assert "5.6 \N{MULTIPLICATION SIGN}auto against slicethroughput, concurrency 2 · 256 tokens" in text
        assert "2.99 GB/shighest throughputconcurrency 2 · 256 tokens" in text
        assert "Δ over 4 rounds in turns: ≈ where their spreads overlap" in text

    def test_what_was_run_is_told_as_far_as_it_is_known(self, document: dict[str, Any]) -> None:
        for run in document["runs"]:
            run |= {"prefill": "tp2", "decode": "dp2"}
        document |= {"preset": "staging-sweep", "traffic": {"file": "trace.jsonl", "requests": {"prompts": 500}}}
        text = text_of(render({"document": document}))
        assert "preset staging-sweep · prefill tp2 → decode dp2 · 32 layers · 8 KV heads of 128 bf16" in text
        assert "filetrace.jsonlrequestsprompts 500" in text

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"kind": "mla", "head_dim": 576, "v_head_dim": 0, "kv_heads": 1}, "latents of 576 bf16"),
            ({"kind": "mha", "head_dim": 192, "v_head_dim": 128}, "8 KV heads of 192 and 128 bf16"),
        ],
    )
    def test_the_shape_is_told(self, document: dict[str, Any], changes: dict[str, Any], words: str) -> None:
        document["shape"] |= changes
        assert f"32 layers · {words} ·" in text_of(render({"document": document}))

    def test_of_many_floors_the_nearest_two_are_named_at_the_top(self, document: dict[str, Any]) -> None:
        document["floors"] |= {"device_copy_gb_per_s": 1900.0, "p2p_gb_per_s": 180.0}
        head = ET.fromstring(render({"document": document})).find("./body/main/header")
        assert head is not None
        told = " ".join(head.itertext())
        assert "of one write" in told
        assert "of one memcpy" in told
        assert "device copy" not in told


@pytest.mark.usefixtures("charts_left_out")
class TestTable:
    def test_it_has_the_terminal_s_columns(self, document: dict[str, Any]) -> None:
        rows = table(render({"document": document}))
        assert len(rows) == 9
        expected = {
            "PATH": "staged", "CONC": "2", "TOKENS": "256", "VERIFIED": "yes", "ROOMS/S": "56.15", "GB/S": "1.88",
            "Δ GB/S": "+253%?", "OF MEMCPY": "15.3 %", "P50": "31 ms", "P99": "43.5 ms", "SCATTER": "3.96 ms",
        }  # fmt: skip
        assert {name: rows[4][name] for name in expected} == expected

    def test_what_the_terminal_takes_for_granted_is_told_when_it_differs(self, document: dict[str, Any]) -> None:
        assert "PAGE ORDER" not in table(render({"document": document}))[0]
        document["runs"][0]["page_order"] = "contiguous"
        assert [row["PAGE ORDER"] for row in table(render({"document": document}))[:2]] == ["contiguous", "random"]


class TestUntrusted:
    def test_nothing_that_agents_or_users_say_becomes_markup(self, whole: dict[str, Any]) -> None:
        document = dict(whole["document"])
        document["shape"] = {**document["shape"], "model": EVIL, "dtype": EVIL}
        document |= {"preset": EVIL, "traffic": {EVIL: {EVIL: EVIL}}, "env": {EVIL: EVIL, "lanes": [EVIL]}}
        document["runs"] = [
            {**run, "path": EVIL, "transport": EVIL, "pipeline": EVIL, "cp_mode": EVIL, "prefill": EVIL, "decode": EVIL}
            for run in document["runs"]
        ]
        page = render({
            "document": document,
            "command": EVIL,
            "started_at": EVIL,
        })  # fmt: skip
        assert "<script" not in page
        assert all(each.isprintable() or each in "\n\t" for each in page)
        assert not list(ET.fromstring(page).iter("script"))
        assert page.encode("utf-8")
        assert "<script>alert('x')</script>" in text_of(page)


@pytest.mark.usefixtures("charts_left_out")
class TestAbsence:
    def test_a_run_in_which_everything_failed_is_in_the_table_only(self, document: dict[str, Any]) -> None:
        nothing = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"))
        lost = {
            "gb_per_s": 0.0,
            "rooms_per_s": 0.0,
            "failed": 8,
            "verified": False,
            "latency_ms": nothing,
            "ttft_ms": nothing,
        }
        document["runs"][0].update(lost)
        page = render({"document": document})
        assert table(page)[0]["VERIFIED"] == "no"
        assert table(page)[0]["P50"] == "-"
