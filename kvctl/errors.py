"""Exception that ends a command with an error message and an exit code.

`kvctl` imports only `kvctl_agent.contract` of the agent, so its errors are separate from `kvctl_agent.errors`. Usage
errors are `click.UsageError` (exit code 2), for which click also prints the usage line.
"""

from __future__ import annotations

from kvctl.exit_codes import ExitCode


class CliError(Exception):
    """Failure of a command, with the error message to print and the exit code.

    Args:
        message: one line with the problem, the object, and the next step.
        code: exit code of the process.
    """

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code
