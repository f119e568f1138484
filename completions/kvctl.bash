# Completion of kvctl for bash, printed by `kvctl completion bash`. To install it:
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
