"""`python -m kvctl_agent.observer DIRECTORY`: starts the observer of a socket directory, unless one runs.

It returns when the observer can be reached: 0, or 1 with the reason on standard error. The observer itself is neither a
child nor in the session of the process that has started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Starts the observer; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m kvctl_agent.observer DIRECTORY", file=sys.stderr)
        return 2
    directory = Path(arguments[0]).absolute()
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        status = 1
        try:
            _detach(writing)
            _observe(directory, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode(errors="replace")
    if answer == "ready":
        return 0
    print(answer or "the observer ended while it started", file=sys.stderr)
    return 1


def _observe(directory: Path, writing: int) -> None:
    def ready(problem: str) -> None:
        os.write(writing, problem.encode(errors="replace")[:4000] or b"ready")
        os.close(writing)

    try:
        from kvctl_agent.observer.process import keep_traceback, serve
    except ImportError as error:
        ready(f"{type(error).__name__}: {error}")
        return
    try:
        serve(directory, ready)
    except BaseException:
        keep_traceback(directory)
        raise


def _detach(kept: int) -> None:
    """Leaves the session, files, signals and processors of the process that has started this one."""
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- before any import
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # engines pin their threads, from one of which this may come
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
