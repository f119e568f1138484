"""Asks the agent's side to replay a recording: in a process of its own, because the machines are not ours to import."""

from __future__ import annotations

import subprocess
import sys

import orjson

from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.lab.replay.messages import AgentVerdict, ReplayReply, ReplayRequest

_LONGEST_S = 3600.0
_CODES = {"version": ExitCode.PROTOCOL, "unknown-agent": ExitCode.USAGE, "unreadable": ExitCode.FAILED}


def replay(request: ReplayRequest, *, quiet: bool) -> list[AgentVerdict]:
    """Runs the recorded inputs through the machines; progress goes to our stderr unless `quiet`.

    Raises:
        CliError: the recording cannot be replayed; exit 6 where another build recorded it.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvctl.lab.replay"],
            input=orjson.dumps(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"the replay of {request['path']} was not done after {_LONGEST_S:g} s; replay one --agent at a time"
        raise CliError(text, ExitCode.TIMEOUT) from None
    if done.returncode != 0:
        raise CliError(f"the replay ended with code {done.returncode}; its traceback is above (without -q)")
    reply: ReplayReply = orjson.loads(done.stdout)
    if "agents" not in reply:
        error = reply["error"]
        raise CliError(error["message"], _CODES.get(error["code"], ExitCode.FAILED))
    return reply["agents"]
