"""What a shell may put where the cursor is: commands, options, their values; names of agents, contexts, rooms.

Asked by the scripts of `kvctl completion` at every press of a key, so it is quick, and it never fails aloud: whatever
is wrong, with the command line, a file or an agent, there is just nothing to put there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from kvctl.commands.options import KvctlGroup
from kvctl.commands.settings import resolve
from kvctl.render.sanitize import one_line

if TYPE_CHECKING:
    from kvctl.client.calls import Call

VARIABLE = "_KVCTL_COMPLETE"
LINE = "_KVCTL_LINE"
# Of the 200 ms that a person does not notice, the interpreter takes the rest. Where nobody at all answers so soon, the
# machine is a busy one, and a late answer is better than none.
_ANSWER_NS = (80_000_000, 400_000_000)
_MOST_ROOMS = 64

Items = list[CompletionItem[str]]


def answer(root: click.Command, words: Sequence[str]) -> int:
    """Prints a line `type TAB value TAB help` for each possibility; type is plain, file or dir.

    Args:
        words: after `kvctl`, the one under the cursor last; instead of them the variable LINE may hold the whole line
            as it was typed, for shells whose words are not those of the command.
    """
    line = os.environ.get(LINE)
    if line is not None:
        words = split_arg_string(line)[1:]
        words = [*words, ""] if not line or line[-1].isspace() else words
    *before, incomplete = words or [""]
    sys.stdout.write(
        "".join(
            f"{item.type}\t{item.value}\t{_help(item)}\n"
            for item in _items(root, before, incomplete)
            if item.value.isprintable()
        )
    )
    return 0


def _items(root: click.Command, words: list[str], incomplete: str) -> Items:
    try:
        return ShellComplete(root, {}, "kvctl", VARIABLE).get_completions(words, incomplete)
    except (Exception, SystemExit):  # see above: whatever is wrong
        return []


def _help(item: CompletionItem[str]) -> str:
    return one_line(item.help or "").partition(". ")[0]


def agents(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Agents of this machine that are alive."""
    from kvctl.client.endpoints import discover

    return _beginning(((endpoint.name, "") for endpoint in discover().live), incomplete)


def contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Contexts in the user file."""
    from kvctl.commands.files import user_file

    return _beginning(((name, "") for name in user_file().contexts), incomplete)


def columns(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Columns of the command's view, after those that stand there already."""
    command = ctx.command
    view = command.default_view(ctx) if isinstance(command, KvctlGroup) else getattr(command, "view", None)
    if view is None:
        return []
    before, comma, last = incomplete.rpartition(",")
    there = {name.lstrip("-") for name in before.split(",")}
    minus = "-" if last.startswith("-") else ""
    names = ((f"{before}{comma}{minus}{name}", "") for name in view.names() if name not in there)
    return _beginning(names, incomplete)


def rooms(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Rooms that the agents have now or had lately, the latest first."""
    from kvctl.client.calls import Call

    found: dict[str, tuple[int, str]] = {}
    calls = tuple(Call(command, {"limit": _MOST_ROOMS}) for command in ("rooms", "history", "failed"))
    for row in _answers(ctx, calls):
        opened, text = row["opened_at_ns"], f"{row['state']} on {row['agent']}"
        if row["room"] not in found or found[row["room"]][0] < opened:
            found[row["room"]] = (opened, text)
    latest = sorted(found.items(), key=lambda each: each[1][0], reverse=True)
    return _beginning(((room, text) for room, (_, text) in latest), incomplete)[:_MOST_ROOMS]


def _answers(ctx: click.Context, calls: Sequence[Call]) -> list[dict[str, Any]]:
    from kvctl.client.fleet import room_rows
    from kvctl.commands.queries import source

    settings = resolve(ctx.ensure_object(dict))
    for timeout_ns in _ANSWER_NS:
        with source(replace(settings, timeout_ns=timeout_ns)) as asked:
            survey = asked.survey(calls)
        if survey.agents or not survey.discovery.live:
            break
    return [row for call in calls for agent in survey.agents for row in room_rows(agent.data, call.command)]


def _beginning(items: Iterable[tuple[str, str]], incomplete: str) -> Items:
    return [CompletionItem(value, help=text or None) for value, text in items if value.startswith(incomplete)]
