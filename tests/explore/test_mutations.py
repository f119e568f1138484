"""The explorer can complain: each of the faults that are put into the machines is found, and told as a history."""

from __future__ import annotations

import re

import pytest

from tests.explore.explorer.search import Bounds
from tests.explore.mutations import MUTATIONS, Mutation
from tests.support.protocol.invariants import Broken
from tests.support.sampling import sampled

BOUND = 80_000


@pytest.mark.parametrize("mutation", sampled(MUTATIONS, 6))
def test_a_fault_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.put_in(monkeypatch)
    with pytest.raises(Broken) as caught:
        mutation.configuration.explore(Bounds(BOUND))
    complaint, *history = str(caught.value).splitlines()
    assert complaint.startswith(f"{mutation.name}: ")
    assert re.search(mutation.complaint, complaint)
    assert [int(line.split(".")[0]) for line in history] == list(range(1, len(history) + 1))
    assert history


def test_a_history_says_in_words_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = next(each for each in MUTATIONS if each.name == "success on the last chunk")
    mutation.put_in(monkeypatch)
    with pytest.raises(Broken) as caught:
        mutation.configuration.explore(Bounds(BOUND))
    complaint, *history = str(caught.value).splitlines()
    gap = "writer 0 chunk 0 layers 0-1 are not in their pages"
    assert complaint == f"success on the last chunk: room 7 succeeds, but {gap}"
    part = "KV writer 0 chunk 1 layers 0-1 of room 7 nonce 1007"
    assert history == [
        "   1. prefill-0's engine: SendPages(7), Finish(7)",
        "   2. prefill-0 begins to write KV writer 0 chunk 0 layers 0-1 of room 7 nonce 1007 to decode-0",
        f"   3. prefill-0 begins to write {part} to decode-0",
        f"   4. prefill-0's write lands: {part} to decode-0",
        f"   5. prefill-0 → decode-0: tag, {part}",
    ]
