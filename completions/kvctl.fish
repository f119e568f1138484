# Completion of kvctl for fish, printed by `kvctl completion fish`. To install it:
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
