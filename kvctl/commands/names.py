"""Arguments that name something alive, so that a shell can complete them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_LARGEST_ROOM = (1 << 64) - 1


class AgentName(click.ParamType[str]):
    """The name of an agent."""

    name = "agent"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from kvctl.commands import completion_values

        return completion_values.agents(ctx, param, incomplete)


class RoomNumber(click.ParamType[str]):
    """An unsigned 64-bit number, kept as the text that the admin socket wants."""

    name = "room"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value).isdecimal() or int(value) > _LARGEST_ROOM:
            self.fail(f"{value!r} is not a room number, 0 to {_LARGEST_ROOM}", param, ctx)
        return str(int(value))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from kvctl.commands import completion_values

        return completion_values.rooms(ctx, param, incomplete)
