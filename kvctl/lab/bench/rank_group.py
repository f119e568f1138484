"""All ranks of a fleet: commands out, answers in, with a deadline on every wait and an end for every process.

One thread, one selector. Whatever goes wrong — a rank dies, fails, hangs, floods its output, or the user has had
enough — `close` ends every process that was started, in order where the rank still can, by force where it cannot.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from kvctl.lab.bench.process import RankProcess
from kvctl.lab.demo.failures import RankDied, RankFailed, RankOverdue
from kvctl.lab.ranks.bench_messages import Command

CLOSE_S = 8.0
"""Time that ranks get to close their agents before they are killed; a rank gives itself 5."""

_EXIT_AFTER_FATAL_S = 1.0
_TICK_S = 0.2


class RankGroup:
    """The ranks of one fleet."""

    def __init__(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """`on_tick` is called several times a second while ranks are awaited."""
        self.ranks: dict[str, RankProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._on_tick = on_tick
        self._closed = False

    def start(self, name: str, argv: Callable[[int], Sequence[str]], env: Mapping[str, str]) -> None:
        """Start one more rank."""
        rank = RankProcess(name, argv, env)
        self.ranks[name] = rank
        for file in (rank.channel, rank.output, rank.exit_fd):
            self._selector.register(file, selectors.EVENT_READ, rank)

    def ask(self, commands: Mapping[str, Command], timeout_s: float, doing: str) -> dict[str, Mapping[str, Any]]:
        """Give ranks a command each and wait for all their answers.

        Args:
            commands: by rank name.
            doing: what this is, for error messages.

        Raises:
            RankDied, RankFailed, RankOverdue: the first thing that went wrong; call `close` next.
        """
        deadline = time.monotonic() + timeout_s
        for name, command in commands.items():
            self.ranks[name].send(command)
        while True:
            self._check(doing)
            missing = [name for name in commands if self.ranks[name].answer is None]
            if not missing:
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RankOverdue(missing[0], doing, timeout_s, self.ranks[missing[0]].doing, len(missing) - 1)
            self._hear(min(left_s, _TICK_S))
            self._on_tick()
        return {name: self.ranks[name].answer or {} for name in commands}

    def wait(self, seconds: float, doing: str) -> None:
        """Let time pass while looking after the ranks.

        Raises:
            RankDied, RankFailed: as `ask`.
        """
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self._check(doing)
            self._hear(min(left_s, _TICK_S))
            self._on_tick()

    def close(self) -> dict[str, int]:
        """End every rank and wait until it is gone; bounded by `CLOSE_S` and a kill.

        Returns:
            The exit status of each rank, negative for a signal.
        """
        if not self._closed:
            self._closed = True
            for rank in self.ranks.values():
                rank.hang_up()
            deadline = time.monotonic() + CLOSE_S
            try:
                while self._running() and (left_s := deadline - time.monotonic()) > 0:
                    # Output is still read: a rank that cannot print cannot exit.
                    self._hear(min(left_s, _TICK_S))
            finally:
                for rank in self._running():
                    rank.kill()
                for rank in self.ranks.values():
                    rank.reap()
                self._selector.close()
        return {name: rank.returncode or 0 for name, rank in self.ranks.items()}

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self.ranks.values() if rank.returncode is None]

    def _hear(self, timeout_s: float) -> None:
        for rank in {id(key.data): key.data for key, _ in self._selector.select(timeout_s)}.values():
            rank.hear()
            # What is at its end for ever would wake us at once, for ever.
            over = [
                (rank.channel, rank.hung_up),
                (rank.output, rank.silent),
                (rank.exit_fd, rank.returncode is not None),
            ]
            for file in (file for file, ended in over if ended):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(file)

    def _check(self, doing: str) -> None:
        """Raise the first cause of trouble: a process killed from outside before the errors that this gave others."""
        failed: RankProcess | None = None
        for rank in self.ranks.values():
            self._check_alive(rank, doing)
            failed = failed or (rank if rank.fatal is not None else None)
        if failed is not None:
            self._first_cause(failed, doing)

    def _check_alive(self, rank: RankProcess, doing: str) -> None:
        code = rank.returncode
        if code is None:
            return
        rank.hear()
        if rank.fatal is None and not (rank.leaving and rank.answer is not None):
            raise RankDied(rank.name, rank.pid, code, doing, rank.last_words)

    def _first_cause(self, failed: RankProcess, doing: str) -> NoReturn:
        """A rank that lost its peer may say so before the peer's death is seen: look a little longer."""
        deadline = time.monotonic() + _EXIT_AFTER_FATAL_S
        while failed.returncode is None and time.monotonic() < deadline:
            self._hear(0.05)
            for rank in self.ranks.values():
                self._check_alive(rank, doing)
        fatal = failed.fatal or {}
        raise RankFailed(failed.name, str(fatal.get("code", "")), str(fatal.get("message", "")), doing)
