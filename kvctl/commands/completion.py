"""Shell completion: the scripts of `kvctl completion`, and the values that the scripts request from `kvctl`.

The scripts contain no commands or options, so that they remain valid when kvctl changes. At every press of the
completion key they run `kvctl` with `_KVCTL_COMPLETE` set. Completion must therefore be quick and never fail: if the
command line, a file or an agent is invalid, there are simply no completions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from kvctl.commands.options import GlobalOptions, KvctlCommand
from kvctl.commands.settings import resolve
from kvctl.commands.stdio import silence_stdout
from kvctl.render.sanitize import one_line

if TYPE_CHECKING:
    from kvctl.client.calls import Call
    from kvctl.client.fleet import AgentAnswer

_BASH = r"""# Completion of kvctl for bash, printed by `kvctl completion bash`. To install it:
#   kvctl completion bash > ~/.local/share/bash-completion/completions/kvctl
_kvctl() {
    local line="${COMP_LINE:0:COMP_POINT}" word ahead="" type value help
    word="${line##*[[:space:]]}"
    # bash splits words at = and : and expects only the text after the last of them.
    [[ $word == *[=:]* ]] && ahead="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while IFS=$'\t' read -r type value help; do
        case $type in
            plain)
                value="${value#"$ahead"}"
                [[ $value == *[!A-Za-z0-9_.,:=@%+/-]* ]] && printf -v value '%q' "$value"
                COMPREPLY+=("$value")
                ;;
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
        esac
    done < <(_KVCTL_COMPLETE=bash _KVCTL_LINE="$line" "$1" 2>/dev/null)
}
complete -o nosort -F _kvctl kvctl
"""

_ZSH = r"""#compdef kvctl
# Completion of kvctl for zsh, printed by `kvctl completion zsh`. To install it, in a folder of $fpath:
#   kvctl completion zsh > ~/.zfunc/_kvctl
_kvctl() {
    local -a plain described
    local line type value help command=${~${(Q)words[1]}}
    for line in "${(@f)$(_KVCTL_COMPLETE=zsh $command "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}"; do
        type=${line%%$'\t'*} line=${line#*$'\t'}
        value=${line%%$'\t'*} help=${line#*$'\t'}
        case $type in
            plain) if [[ -n $help ]]; then described+=("${value//:/\\:}:$help"); else plain+=("$value"); fi ;;
            file) _files ;;
            dir) _files -/ ;;
        esac
    done
    [[ $PREFIX == --*=* ]] && compset -P '*='
    (( $#described )) && _describe -V kvctl described
    (( $#plain )) && compadd -V kvctl -a plain
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _kvctl "$@"
else
    compdef _kvctl kvctl
fi
"""

_FISH = r"""# Completion of kvctl for fish, printed by `kvctl completion fish`. To install it:
#   kvctl completion fish > ~/.config/fish/completions/kvctl.fish
function __kvctl_complete
    set -l words (commandline -opc)
    set -l word (commandline -ct)
    set -l ahead (string match -r -- '^--[^=]*=' "$word")
    _KVCTL_COMPLETE=fish $words "$word" 2>/dev/null | while read -l -d \t type value help
        switch $type
            case plain
                printf '%s%s\t%s\n' "$ahead" $value "$help"
            case file
                __fish_complete_path "$word"
            case dir
                __fish_complete_directories "$word"
        end
    end
end
complete -c kvctl -f -k -a '(__kvctl_complete)'
"""


@dataclass(frozen=True, slots=True)
class Script:
    """Completion script of a shell, and the file name that this shell requires."""

    text: str
    file: str


SCRIPTS = {"bash": Script(_BASH, "kvctl.bash"), "zsh": Script(_ZSH, "_kvctl"), "fish": Script(_FISH, "kvctl.fish")}


@click.command(
    cls=KvctlCommand,
    examples=[
        ("bash, for all shells", "kvctl completion bash > ~/.local/share/bash-completion/completions/kvctl"),
        ("zsh, for all shells", "kvctl completion zsh > ~/.zfunc/_kvctl"),
        ("fish, for this shell", "kvctl completion fish | source"),
    ],
)
@click.argument("shell", type=click.Choice(tuple(SCRIPTS)))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes commands, options, their values, agents and rooms.

    To try it in the current shell: source <(kvctl completion bash) or source <(kvctl completion zsh).
    """
    try:
        sys.stdout.write(SCRIPTS[shell].text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()


VARIABLE = "_KVCTL_COMPLETE"
LINE = "_KVCTL_LINE"
# Time limits for agents. 80 ms plus the start of the interpreter is about 200 ms, which a person does not notice. If no
# agent answers in this time, the machine is busy, and a late answer is better than none.
_ANSWER_NS = (80_000_000, 400_000_000)
_MOST_ROOMS = 64

Items = list[CompletionItem[str]]


def answer(root: click.Command, words: Sequence[str]) -> int:
    """Prints a line `type TAB value TAB help` for each completion; type is plain, file or dir.

    Args:
        root: the command `kvctl`.
        words: words after `kvctl`, the last one incomplete. The variable LINE, if set, contains the whole command line
            instead, for shells that split words differently from the command.
    """
    line = os.environ.get(LINE)
    if line is not None:
        words = split_arg_string(line)[1:]
        words = [*words, ""] if not line or line[-1].isspace() else words
    *before, incomplete = words or [""]
    sys.stdout.write(
        "".join(
            f"{item.type}\t{item.value}\t{_help(item)}\n"
            for item in _completions(root, before, incomplete)
            if item.value.isprintable()
        )
    )
    return 0


def _completions(root: click.Command, words: list[str], incomplete: str) -> Items:
    try:
        return ShellComplete(root, {}, "kvctl", VARIABLE).get_completions(words, incomplete)
    except (Exception, SystemExit):  # see the module's docstring
        return []


def _help(item: CompletionItem[str]) -> str:
    return one_line(item.help or "").partition(". ")[0]


def agents(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the names of the context's agents, or else of live agents on this machine."""
    from kvctl.client.endpoints import discover, is_address

    flags = {**ctx.ensure_object(dict), "endpoint": ()}
    if any(map(is_address, resolve(flags).endpoints)):
        return _matching(((agent.name, "") for agent in _agents(ctx, flags=flags)), incomplete)
    return _matching(((endpoint.name, "") for endpoint in discover().live), incomplete)


def hosts(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the names of the agents' hosts."""
    return _matching(((host, "") for host in sorted({agent.host for agent in _agents(ctx) if agent.host})), incomplete)


def labels(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the keys of labels, and the values of host and role in the last of several."""
    from kvctl.client.endpoints import LABELS

    before, comma, last = incomplete.rpartition(",")
    key, separator, value = last.partition("=")
    if not separator:
        return _matching(((f"{before}{comma}{each}=", "") for each in LABELS), incomplete)
    start = f"{before}{comma}{key}="
    if key == "host":
        return [CompletionItem(f"{start}{item.value}") for item in hosts(ctx, param, value)]
    return _matching(((f"{start}{role}", "") for role in ("prefill", "decode") if key == "role"), incomplete)


def contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the names of contexts in the user file."""
    from kvctl.commands.settings import user_file

    return _matching(((name, "") for name in user_file().contexts), incomplete)


def columns(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the last name in a list of columns, leaving out the columns that are already in the list."""
    view = ctx.command.shown_view(ctx) if isinstance(ctx.command, GlobalOptions) else None
    if view is None:
        return []
    before, comma, last = incomplete.rpartition(",")
    present = {name.lstrip("-") for name in before.split(",")}
    minus = "-" if last.startswith("-") else ""
    names = ((f"{before}{comma}{minus}{name}", "") for name in view.names() if name not in present)
    return _matching(names, incomplete)


def rooms(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the numbers of active and recently finished rooms, the latest first."""
    from kvctl.client.calls import Call

    found: dict[str, tuple[int, str]] = {}
    calls = tuple(Call(command, {"limit": _MOST_ROOMS}) for command in ("rooms", "history", "failed"))
    for row in _answers(ctx, calls):
        opened, text = row["opened_at_ns"], f"{row['state']} on {row['agent']}"
        if row["room"] not in found or found[row["room"]][0] < opened:
            found[row["room"]] = (opened, text)
    latest = sorted(found.items(), key=lambda each: each[1][0], reverse=True)
    return _matching(((room, text) for room, (_, text) in latest), incomplete)[:_MOST_ROOMS]


def _answers(ctx: click.Context, calls: Sequence[Call]) -> list[dict[str, Any]]:
    from kvctl.client.fleet import room_rows

    agents = _agents(ctx, calls)
    return [row for call in calls for agent in agents for row in room_rows(agent.data, call.command)]


def _agents(
    ctx: click.Context, calls: Sequence[Call] = (), flags: Mapping[str, Any] | None = None
) -> list[AgentAnswer]:
    """Returns the agents that answer `calls` in the time that a person waits for a completion.

    `flags` are by default those of the command line.
    """
    from kvctl.commands.queries import source

    settings = resolve(ctx.ensure_object(dict) if flags is None else flags)
    for timeout_ns in _ANSWER_NS:
        with source(replace(settings, timeout_ns=timeout_ns)) as fleet:
            survey = fleet.survey(calls)
        if survey.agents or not survey.discovery.live:
            break
    return survey.agents


def _matching(items: Iterable[tuple[str, str]], incomplete: str) -> Items:
    return [CompletionItem(value, help=text or None) for value, text in items if value.startswith(incomplete)]
