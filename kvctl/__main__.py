"""Where the process begins: `kvctl`, and `python -m kvctl` for environments whose scripts are not on PATH."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # what is imported before `main` runs cannot be interrupted quietly: little is
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def main() -> NoReturn:
    """Runs `kvctl` and ends the process. Ctrl-C ends it quietly from here on, also while modules are imported."""
    # An exception in the middle of an import is told as a traceback, and now and then it is swallowed.
    catch = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if catch:
        signal.signal(signal.SIGINT, _leave)
    from kvctl.cli import main as run
    from kvctl.exit_codes import ExitCode

    try:
        if catch:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        raise SystemExit(ExitCode.INTERRUPTED) from None


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
