"""Asks the rig for a plan: in a short process of its own, because layouts are the agent's side of the house."""

from __future__ import annotations

import subprocess
import sys

import orjson

from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.lab.ranks.bench_messages import Plan, PlanReply, PlanRequest

_TIMEOUT_S = 60.0
_CODES = {"usage": ExitCode.USAGE, "unavailable": ExitCode.FAILED}


def plan(request: PlanRequest) -> Plan:
    """Resolve a request.

    Raises:
        CliError: it cannot be (exit 2, the message has the arithmetic), or the agent's side is not installed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvctl.lab.ranks", "plan"],
            input=orjson.dumps(request),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CliError(f"the planner gave no answer within {_TIMEOUT_S:g} s: is this machine overloaded?") from None
    if done.returncode != 0:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise CliError(f"the planner ended with code {done.returncode}: {''.join(last) or 'no message'}")
    reply: PlanReply = orjson.loads(done.stdout)
    if "plan" not in reply:
        error = reply["error"]
        raise CliError(error["message"], _CODES.get(error["code"], ExitCode.FAILED))
    return reply["plan"]
