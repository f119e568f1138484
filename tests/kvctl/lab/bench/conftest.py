"""A scripted rank: a real process that speaks the rig's side of the channel, and misbehaves on demand."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from kvctl.lab.bench.rank_group import RankGroup

_SCRIPT = """
import json, os, signal, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[1]))
lines = channel.makefile("rwb")
def say(kind, to, **data):
    lines.write(json.dumps(dict(kind=kind, to=to, data=data)).encode() + b"\\n"); lines.flush()
def answer(line, **data):
    say("answer", json.loads(line)["do"], **data)
BODY
"""

Start = Callable[..., None]


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.setattr("kvctl.lab.bench.rank_group.CLOSE_S", 0.2)  # most scripted ranks do not care that we hang up
    with RankGroup() as crew:
        yield crew


@pytest.fixture
def start(crew: RankGroup) -> Start:
    """Starts a rank that runs `body`, in which `lines`, `say` and `answer` are defined."""

    def start(name: str, body: str = "for line in lines: answer(line, pid=os.getpid())") -> None:
        script = _SCRIPT.replace("BODY", body)
        crew.start(name, lambda fd: [sys.executable, "-c", script, str(fd)], os.environ)

    return start
