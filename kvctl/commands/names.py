"""Arguments that name something alive, so that a shell can complete them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class AgentName(click.ParamType[str]):
    """The name of an agent."""

    name = "agent"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from kvctl.commands import completing

        return completing.agents(ctx, param, incomplete)
