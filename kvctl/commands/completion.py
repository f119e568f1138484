"""`kvctl completion`: the scripts by which shells ask `kvctl` what may stand where the cursor is.

The scripts know no command and no option, so they stay right when kvctl changes:
`kvctl.commands.completion_values` answers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click

from kvctl.commands.options import KvctlCommand
from kvctl.commands.stdio import silence_stdout

_BASH = r"""# Completion of kvctl for bash, printed by `kvctl completion bash`. For all shells of yours, once:
#   kvctl completion bash > ~/.local/share/bash-completion/completions/kvctl
_kvctl() {
    local line="${COMP_LINE:0:COMP_POINT}" word ahead="" type value help
    word="${line##*[[:space:]]}"
    # bash splits words at = and : and wants only what stands behind the last of them.
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
# Completion of kvctl for zsh, printed by `kvctl completion zsh`. For all shells of yours, once, in a folder of $fpath:
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

_FISH = r"""# Completion of kvctl for fish, printed by `kvctl completion fish`. For all shells of yours, once:
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
    """A shell's script and the name of its file, as that shell wants it."""

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
    """Print the script that makes SHELL complete commands, options, their values, live agents and rooms.

    To try it in this shell: source <(kvctl completion bash), source <(kvctl completion zsh).
    """
    try:
        sys.stdout.write(SCRIPTS[shell].text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
