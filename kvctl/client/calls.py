"""One request as the tool makes it, held against the contract: what is not declared there cannot be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvctl_agent.contract.commands import COMMANDS_BY_NAME


@dataclass(frozen=True, slots=True)
class Call:
    """An admin command with its arguments; arguments that are None are left out.

    Raises:
        ValueError: the contract declares no such command or argument.
    """

    command: str
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        declared = COMMANDS_BY_NAME.get(self.command)
        if declared is None:
            raise ValueError(f"the contract declares no admin command {self.command!r}")
        given = {name: value for name, value in self.args.items() if value is not None}
        names = {arg.name for arg in declared.args}
        required = {arg.name for arg in declared.args if arg.required}
        if given.keys() - names or required - given.keys():
            raise ValueError(f"{self.command} takes {sorted(names)} and needs {sorted(required)}, got {sorted(given)}")
        object.__setattr__(self, "args", given)
