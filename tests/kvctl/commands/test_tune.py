"""`kvctl tune`: refused options, and a real search in a small fleet."""

from __future__ import annotations

import json
from typing import Any

import pytest

from docs.json_schema import document_conflicts

SMALL = ("--layers", "2", "--kv-heads", "4", "--head-dim", "32", "--tokens", "64", "--rooms", "8")


@pytest.mark.full
def test_settings_are_measured_in_a_small_fleet(kvctl: Any) -> None:
    outcome = kvctl(
        "tune", *SMALL, "--transport", "loopback", "--prefill-tp", "2", "--page-sizes", "16,32",
        "--path", "slice,staged", "--layer-ms", "1", "--point-seconds", "0.2", "-o", "json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document_conflicts(document) == []
    (found,) = document["data"]
    best, *others = found["options"]
    assert best["recommended"]
    assert not any(other["recommended"] for other in others)
    tried = {(each["path"], each["page_size"], each["pipeline"]) for each in found["options"]}
    assert tried >= {("slice", 16, "off"), ("staged", 16, "off"), (best["path"], 32, "off")}
    assert {pipeline for _, _, pipeline in tried} == {"off", "on", "1"}
    assert len(tried) == len(found["options"]) == 5
    assert found["settings"] == {
        "transport": "loopback",
        "path": best["path"],
        "chunk_tokens": best["chunk_tokens"],
        **({"staging_ring_mb": 1} if best["path"] == "staged" else {}),
        "pipeline": "off" if best["pipeline"] == "off" else "on",
        **({"pipeline_group_size": 1} if best["pipeline"] == "1" else {}),
    }
    assert found["engine_settings"] == {"page_size": best["page_size"]}
    for each in found["options"]:
        assert 0 < each["rooms_per_s_low"] <= each["rooms_per_s"] <= each["rooms_per_s_high"]
        assert (each["ring_bytes"] is not None) == (each["path"] == "staged")
