"""Commands on the hand-written pages that only read, run as they are written there, on the fleet of fixed answers."""

from __future__ import annotations

from typing import Any

import click
import pytest

from kvctl.commands.mcp_server import READING
from tests.test_docs import Mention, mentions, parse, words_of

# They choose other agents or files, or do not end.
ELSEWHERE = {"-e", "-c", "--from", "-w", "--key", "--server-key", "--perfetto", "--prune", "--help", "--url", "…"}
STANDS_FOR = {"AGENT": "decode-0", "A": "prefill-0", "B": "decode-0", "CODE": "KV_PEER_LOST", "KEY": "checksum"}
OF_THE_PAGE = {"hosts show"}  # names a host of the page's fleet


def reading() -> list[list[str]]:
    found = {tuple(words): None for mention in sorted(set(mentions())) if (words := _read(mention))}
    return [list(words) for words in found]


def _read(mention: Mention) -> list[str] | None:
    words = words_of(mention)
    if any(word in ELSEWHERE or word.startswith(("-w", "--watch")) for word in words):
        return None
    try:
        context, _ = parse(words, whole=True)
    except click.UsageError:
        return None  # a name of a command in a sentence, without its arguments
    path = context.command_path.removeprefix("kvctl").strip()
    return words[1:] if path in READING and path not in OF_THE_PAGE and not context.params.get("command") else None


def test_documented_commands_answer(fleet: Any, kvctl: Any, canned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")
    known = {"ROOM": canned.ROOM, **STANDS_FOR}
    assert len(reading()) > 38
    for words in reading():
        room = words.index("show") + 1 if words[:2] == ["rooms", "show"] else None
        typed = [canned.ROOM if n == room else known.get(word.strip("[]"), word) for n, word in enumerate(words)]
        done = kvctl(*typed)
        assert done.code in {0, 1}, (words, done.err)
        assert done.out or "--filter" in words or "-l" in words, (words, done.err)
