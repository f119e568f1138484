"""One rank of a bench: told one thing at a time, and heard until it has answered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from kvctl.lab.demo.process import ChildProcess
from kvctl.lab.ranks.bench_messages import Command, Stop


class RankProcess(ChildProcess):
    """A running rank.

    Attributes:
        answer: its answer to the last command, None while that is awaited.
        fatal: the error it said it ends with: {"code", "message"}.
        doing: what it last said it does.
        leaving: it was told to stop, so its end is no surprise.
    """

    def __init__(self, name: str, argv: Callable[[int], Sequence[str]], env: Mapping[str, str]) -> None:
        self.answer: Mapping[str, Any] | None = None
        self.fatal: Mapping[str, Any] | None = None
        self.doing = ""
        self.leaving = False
        super().__init__(name, argv, env)

    def send(self, command: Command) -> None:
        """Hand over a command; the answer to it is awaited from now on."""
        self.answer = None
        self.leaving = isinstance(command, Stop)
        line = orjson.dumps({"do": command.do, "args": command}) + b"\n"
        # Lines down are small against a socket buffer and the rank reads ahead, so waiting here is short. A rank that
        # is gone is found by its exit, with its last words; the broken pipe says less.
        self.channel.setblocking(True)
        self.channel.settimeout(10)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            self.channel.sendall(line)
        self.channel.setblocking(False)

    def take(self, line: Mapping[str, Any]) -> None:
        match line["kind"]:
            case "answer":
                self.answer = line["data"]
            case "fatal":
                self.fatal = line["data"]
            case _:
                self.doing = str(line["data"].get("doing", ""))

    def garbled(self, error: str) -> None:
        self.fatal = {"code": "Garbled", "message": error}
