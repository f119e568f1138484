"""Requests to an agent's admin socket or a registry, checked against the commands that the contract declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvctl_agent.contract.commands import COMMANDS_BY_NAME, REGISTRY_COMMANDS_BY_NAME


@dataclass(frozen=True, slots=True)
class Call:
    """An admin command with its arguments; arguments that are None are omitted.

    An agent or a recording that does not have an `optional` command is not at fault.

    Raises:
        ValueError: the command or an argument is not declared, or a required argument is missing.
    """

    command: str
    args: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = False

    def __post_init__(self) -> None:
        declared = COMMANDS_BY_NAME.get(self.command) or REGISTRY_COMMANDS_BY_NAME.get(self.command)
        if declared is None:
            raise ValueError(f"the contract declares no admin command {self.command!r}")
        args = {name: value for name, value in self.args.items() if value is not None}
        names = {arg.name for arg in declared.args}
        required = {arg.name for arg in declared.args if arg.required}
        if args.keys() - names or required - args.keys():
            raise ValueError(f"{self.command} takes {sorted(names)} and needs {sorted(required)}, got {sorted(args)}")
        object.__setattr__(self, "args", args)
