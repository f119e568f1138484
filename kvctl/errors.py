"""The one exception by which the tool ends on purpose: a sentence for people and a number for scripts.

`kvctl` may import nothing of the agent but its contract, so this tree is separate from `kvctl_agent.errors`. Wrong
usage is `click.UsageError` (exit 2), because click prints the usage line with it.
"""

from __future__ import annotations

from kvctl.exit_codes import ExitCode


class CliError(Exception):
    """The command cannot go on.

    Args:
        message: what happened, to what, and the next step.
        code: what the process exits with.
    """

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code
