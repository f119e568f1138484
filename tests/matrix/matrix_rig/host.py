"""A process that holds one role of every case; it executes a step per command and returns the result.

Its engine and its memory outlive cases. Settings that would slow down ranks sharing a process are reduced: scratch
memory, the time spent on probing transfer costs, and the polling of idle ranks.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvctl_agent.transport.environment import prepare_environment

prepare_environment()

from kvctl.lab.ranks.request import Role  # noqa: E402
from kvctl_agent import parts  # noqa: E402
from kvctl_agent.memory.region import Region  # noqa: E402
from kvctl_agent.paths import calibration  # noqa: E402
from kvctl_agent.runtime import arrivals, peer_connections  # noqa: E402
from kvctl_agent.transport import cost_probe  # noqa: E402
from kvctl_agent.transport.registry import TRANSPORTS, open_transport  # noqa: E402
from tests.matrix.matrix_rig.arena import Arena  # noqa: E402
from tests.matrix.matrix_rig.case import Case  # noqa: E402
from tests.matrix.matrix_rig.ranks import DecodeRanks, Ranks, WentWrong, ranks_of  # noqa: E402
from tests.matrix.matrix_rig.shared_engine import SharedEngine  # noqa: E402

_MIB = 1 << 20
_ARENA_BYTES = 192 * _MIB


class Host:
    """Steps by name; the returned value is the answer."""

    def __init__(self, role: Role, directory: Path) -> None:
        self._role = role
        self._directory = directory
        self._arena = Arena(_ARENA_BYTES)
        self._arena.install()
        self._real = dict(TRANSPORTS)
        self._engine: SharedEngine | None = None
        self._ranks: Ranks | None = None
        self._thrown: list[str] = []
        threading.excepthook = self._note

    def build(self, case: Case) -> None:
        """Creates this role's pools and agents."""
        self._use_engine(case.transport)
        self._arena.reset()
        self._ranks = ranks_of(case, self._role, self._directory)

    def meet(self) -> None:
        self._there().meet()

    def run(self) -> dict[tuple[str, str], float]:
        return dict(self._there().run())

    def check(self) -> tuple[int, list[str]]:
        ranks = self._there()
        assert isinstance(ranks, DecodeRanks)
        nbytes, problems = ranks.check()
        if strays := self._arena.strays():
            problems.append(f"{strays} bytes landed outside the memory of all ranks")
        return nbytes, problems

    def close(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
        if self._thrown:
            thrown, self._thrown = self._thrown, []
            raise WentWrong("threads ended with an exception:\n" + "\n".join(thrown))

    def stop(self) -> None:
        self.close()
        self._drop_engine()

    def _there(self) -> Ranks:
        assert self._ranks is not None
        return self._ranks

    def _use_engine(self, transport: str) -> None:
        if self._engine is not None and self._engine.transport.name != transport:
            self._drop_engine()
        if self._engine is None:
            TRANSPORTS.update(self._real)
            name = f"{self._role[0]}{secrets.token_hex(8)[1:]}"
            self._engine = SharedEngine(open_transport(transport, name), name, [Region(*self._arena.region)])
            TRANSPORTS[transport] = self._engine.open

    def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _note(self, thrown: threading.ExceptHookArgs) -> None:
        lines = traceback.format_exception(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)
        self._thrown.append(f"{thrown.thread.name if thrown.thread else 'a thread'}: {''.join(lines)}")


def serve(connection: Connection, role: Role) -> None:
    """Executes commands until told to stop, or until the test has ended."""
    directory = Path(os.environ["MATRIX_DIRECTORY"])
    host = Host(role, directory)
    while True:
        try:
            step, args = connection.recv()
        except EOFError:
            host.stop()
            return
        connection.send(_answer(getattr(host, step), args))
        if step == "stop":
            return


def _answer(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, step(*args)
    except WentWrong as wrong:
        return False, str(wrong)
    except Exception:
        return False, traceback.format_exc()


def _settle_in() -> None:
    """Reduces polling: dozens of ranks share a core here."""
    parts._SCRATCH_BYTES = _MIB
    peer_connections._COPIES_BYTES = 2 * _MIB
    calibration._ROUNDS = 1
    cost_probe._BUDGET_S = 0.0
    arrivals._SHORTEST_S = 500e-6
    arrivals._LONGEST_S = 4e-3


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.setswitchinterval(1e-3)
    _settle_in()
    serve(Connection(int(sys.argv[1])), "prefill" if sys.argv[2] == "prefill" else "decode")
