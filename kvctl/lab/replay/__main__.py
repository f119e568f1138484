"""`python -m kvctl.lab.replay`: a `ReplayRequest` on stdin, a `ReplayReply` on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from kvctl.lab.replay.messages import ReplayError, ReplayReply

_SAY_EVERY_S = 2.0


def main() -> int:
    """Answer one request; returns the exit code."""
    sys.stdout.write(json.dumps(answer(sys.stdin.buffer.read())) + "\n")
    return 0


def answer(request: bytes) -> ReplayReply:
    """The verdicts, or why there are none."""
    try:
        import msgspec

        from kvctl.lab.replay.messages import ReplayRequest
        from kvctl.lab.replay.recordings import load
        from kvctl.lab.replay.verdicts import judge
        from kvctl_agent.errors import RecordingError, RecordingVersionError
    except ModuleNotFoundError as error:
        message = f"the agent's side is not installed ({error}): pip install 'kvctl[agent]'"
        return _refused("unavailable", message)
    asked = msgspec.json.decode(request, type=ReplayRequest)
    path = Path(asked["path"])
    try:
        agents = load(path)
        names = {agent.name for agent in agents}
        if unknown := [name for name in asked["agents"] if name not in names]:
            return _refused("unknown-agent", f"{path} has no agent {unknown[0]}; it has {', '.join(sorted(names))}")
        chosen = [agent for agent in agents if not asked["agents"] or agent.name in asked["agents"]]
        return ReplayReply(agents=judge(chosen, asked, _Progress()))
    except RecordingVersionError as error:
        return _refused("version", f"{path}: {error}")
    except RecordingError as error:
        return _refused("unreadable", f"{path}: {error}")
    except OSError as error:
        return _refused("unwritable", f"{error.filename or asked['write_test']}: {error.strerror}")


def _refused(code: str, message: str) -> ReplayReply:
    return ReplayReply(error=ReplayError(code=code, message=message))


class _Progress:
    """Says on stderr how far it is, now and then: only long recordings get to hear of it."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_EVERY_S:
            self._said = now
            sys.stderr.write(f"kvctl: replay: {text}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
