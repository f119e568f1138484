"""Entry point of `kvctl` and of `python -m kvctl`."""

from __future__ import annotations

import gc
import os
import signal

# The answers of a large fleet are a million objects without cycles. By default the collector goes over them again and
# again while they are made, which is a fifth of the CPU time of `kvctl top`.
_COLLECT_AFTER = 100_000, 20, 100

# Not imported from typing: this module imports little, because Ctrl-C before `main` prints a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def main() -> NoReturn:
    """Runs `kvctl` and exits; Ctrl-C ends the process without a traceback, even while modules are imported."""
    # KeyboardInterrupt during an import prints a traceback, or is swallowed: exit from the signal handler instead.
    catch = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if catch:
        signal.signal(signal.SIGINT, _leave)
    from kvctl.cli import main as run
    from kvctl.exit_codes import ExitCode

    gc.set_threshold(*_COLLECT_AFTER)
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
