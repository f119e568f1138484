"""Ends a rank process when its parent is gone, however it ended: the rank closes its agent and exits.

Two threads lead to the same end. The kernel sends SIGTERM when the parent dies, and the channel's reader sees end of
file, also where the parent only dropped this rank. Either way the main thread gets `Abandoned`, so that `finally`
blocks run and no socket stays behind; a rank that cannot unwind within `GRACE_S` is ended with its stacks on stderr.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
from types import FrameType

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


class Abandoned(BaseException):
    """The parent is gone. Not an Exception: nothing on the way up may take it for an error of its own."""


def tie_to_parent(parent_pid: int) -> None:
    """Arrange for `Abandoned` in the main thread when process `parent_pid` dies; call it there, first thing.

    Raises:
        Abandoned: it is dead already.
    """
    signal.signal(signal.SIGTERM, _abandoned)
    # The kernel means the thread of the parent that started us: ranks are started from its main thread.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the line above
        raise Abandoned(f"the parent (pid {parent_pid}) is gone")


def abandon() -> None:
    """End this process in order: called by the channel's reader at end of file."""
    # A real signal, because the main thread may sit in a lock or a system call.
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGTERM)


def _abandoned(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # both ways may fire; unwinding must not be cut short
    faulthandler.dump_traceback_later(GRACE_S, exit=True)
    raise Abandoned("the parent is gone")
