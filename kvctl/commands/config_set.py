"""`kvctl config set`: change a value while the agents run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvctl.client.calls import Call
from kvctl.commands.mutations import act, named, yes_option
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.settings import Settings
from kvctl.render.operations import DONE
from kvctl_agent.contract.config import KEYS, KEYS_BY_NAME

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class RuntimeKey(click.ParamType[str]):
    """A configuration key; those that can change while an agent runs complete.

    A key of an agent that is newer than this kvctl passes: the agents judge what is not like any known one.
    """

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from kvctl_agent.contract.settings import near

        known = KEYS_BY_NAME.get(str(value))
        if known is not None and not known.runtime:
            self.fail(f"{value} cannot change while an agent runs: set it where the agent is started", param, ctx)
        if known is None and (hint := near(str(value), KEYS_BY_NAME)):
            self.fail(f"no configuration key {value!r}{hint}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(key.name, help=key.help) for key in KEYS if key.runtime and key.name.startswith(incomplete)
        ]


@click.command(
    "set",
    cls=KvctlCommand,
    view=DONE,
    short_help="Change a value while the agents run.",
    examples=[("Wait a minute for input, on all decode ranks", "kvctl config set waiting_timeout_s 60 -l role=decode")],
)
@click.argument("name", metavar="KEY", type=RuntimeKey())
@click.argument("value")
@yes_option
@pass_settings
def set_value(settings: Settings, name: str, value: str, yes: bool) -> None:
    """Set KEY to VALUE on every agent that matches, until it ends; kvctl config explain KEY lists the allowed values.

    Only keys that kvctl config -o wide marks as RUNTIME can change. Level: admin.
    """
    act(
        settings,
        Call("set", {"key": name, "value": value}),
        lambda agents: f"Set {name} = {value} on {named(agents)}",
        yes=yes,
    )
