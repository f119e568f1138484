"""`kvctl config explain KEY`: one key, as it is declared and as the agents have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.queries import nobody, run
from kvctl.commands.settings import Settings
from kvctl.render.config import EXPLAINED, declared, page, shared
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.view import Row
from kvctl_agent.contract.config import KEYS_BY_NAME, Key

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class KeyName(click.ParamType[Key]):
    """The name of a configuration key, as files, variables or SGLang spell it."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Key:
        wanted = str(value).strip()
        spelled = wanted.lower().removeprefix("kvctl_").replace("-", "_")
        found = KEYS_BY_NAME.get(spelled)
        if found is None:
            found = next((key for key in KEYS_BY_NAME.values() if key.sglang and key.sglang == wanted), None)
        if found is None:
            from kvctl_agent.contract.settings import near

            hint = near(spelled, KEYS_BY_NAME) or "; all of them: kvctl config show"
            self.fail(f"no configuration key {value!r}{hint}", param, ctx)
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(key.name, help=key.help) for key in KEYS_BY_NAME.values() if key.name.startswith(incomplete)
        ]


@click.command(
    cls=KvctlCommand,
    view=EXPLAINED,
    short_help="One key: meaning, allowed values, and the value on each agent.",
    examples=[
        ("What a key does, and its value on each agent", "kvctl config explain staging_ring_mb"),
        ("By its SGLang name", "kvctl config explain SGLANG_DISAGGREGATION_QUEUE_SIZE"),
    ],
)
@click.argument("wanted", metavar="KEY", type=KeyName())
@pass_settings
def explain(settings: Settings, wanted: Key) -> None:
    """What KEY does, its allowed values, how it is set, and its value on each agent with the origin.

    KEY may also be the name of its variable, or what SGLang calls it. Without agents the declaration alone is shown.
    """

    key = wanted  # --key is another matter

    def read(survey: Survey) -> Report:
        answers = survey.answers("config")
        values = shared([(agent.name, data) for agent, data in answers])
        mine = [row for row in values if row["key"] == key.name]
        rows = [declared(key) | {name: row[name] for name in ("value", "origin", "agents")} for row in mine]
        notes = [] if survey.agents or survey.faults else [f"as declared: {nobody(settings, survey).message}"]
        return Report(
            EXPLAINED,
            rows or [declared(key)],
            # The declaration is an answer, too.
            len(answers) or 1,
            survey.faults,
            blocks=lambda kept, width: _blocks(key, kept if rows else ()),
            notes=notes,
        )

    run(settings, EXPLAINED, (Call("config"),), read)


def _blocks(key: Key, rows: Sequence[Row]) -> list[Block]:
    from kvctl_agent.contract.settings import allowed

    return [Text(page(key, allowed(key))), *([Grid(EXPLAINED, rows)] if rows else [])]
