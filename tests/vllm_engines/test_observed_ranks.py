"""vLLM's own NixlConnector with two ranks on each side, and `KVCTL_VLLM=observe`: each rank has its own row."""

from __future__ import annotations

from pathlib import Path

from tests.vllm_engines.conftest import Engines, prompt_of
from tests.vllm_engines.processes import start_all
from tests.vllm_engines.test_observed import BLOCKS, PROMPT, Observed

RANKS = 2


def test_each_rank_of_both_ends_has_the_room_and_its_peer(engines: Engines, folder: Path) -> None:
    engines.stop()
    pair = Observed("pull", folder, tp_size=RANKS)
    try:
        start_all([pair.prefill, pair.decode])
        pair.connect()
        prompt = prompt_of(PROMPT, seed="ranks")
        params = pair.compute(prompt)
        received = pair.receive(prompt, params)
        assert received.tokens == pair.receive(prompt).tokens
        names = {
            role: [f"{role}-tp{rank}@localhost:{pair.ports[role]}" for rank in range(RANKS)] for role in pair.ports
        }
        sent = pair.until(lambda: pair.sent(params), lambda rows: len(rows) == RANKS)
        rows = [row for row in pair.kvctl("rooms", "history") if row["room"] == sent[0]["room"]]
        assert sorted(row["agent"] for row in rows) == sorted([*names["prefill"], *names["decode"]])
        assert {(row["state"], row["pages"]) for row in rows} == {("Success", BLOCKS)}
        # Each decode rank reads from the prefill rank of its number.
        peers = {row["agent"]: row["peers"] for row in rows}
        for own, other in zip(names["decode"], names["prefill"], strict=True):
            assert (peers[own], peers[other]) == ([other], [own])
        received_bytes = {row["bytes"] for row in rows if row["role"] == "decode"}
        assert len(received_bytes) == 1
        assert received_bytes.pop() > 0
    finally:
        pair.stop()
