"""Runs the agents of a recording through the protocol machines again.

The machines are imported on the first call: only `kvctl replay` pays for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvctl.client.recording_reader import readable
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode

if TYPE_CHECKING:
    from kvctl.lab.replay.verdicts import AgentVerdict


def replay(
    path: Path, names: Sequence[str], shrink_s: float | None, test: Path | None, progress: Callable[[str], None]
) -> list[AgentVerdict]:
    """Judge the agents of these names, or all of them if none is given.

    Args:
        shrink_s: time limit for shortening the trace of a breach; None: do not shorten it.
        test: file for a test that repeats the first breach; None: write none.
        progress: called with a line about every few thousand inputs.

    Raises:
        CliError: the recording cannot be read or was made by another build (exit 6), has no such agent (exit 2), or
            the test cannot be written.
    """
    try:
        from kvctl.lab.replay.recordings import load
        from kvctl.lab.replay.verdicts import judge
    except ModuleNotFoundError as error:
        raise CliError(f"the agent's side is not installed ({error}): pip install 'kvctl[agent]'") from error
    with readable(path):
        agents = load(path)
        known = {agent.name for agent in agents}
        if unknown := [name for name in names if name not in known]:
            text = f"{path} has no agent {unknown[0]}; it has {', '.join(sorted(known))}"
            raise CliError(text, ExitCode.USAGE)
        chosen = [agent for agent in agents if not names or agent.name in names]
        try:
            return judge(chosen, shrink_s, test, progress)
        except OSError as error:
            raise CliError(f"{error.filename or test}: {error.strerror}") from None
