"""Entry point of `kubectl kvctl`, a plugin of kubectl: `kvctl` with the agents in the pods of a namespace.

It has kubectl's options, before or after the command: `-n NAMESPACE` in two words, by default that of the context or of
this pod; `--context`, of the kubeconfig file; `--selector LABEL=VALUE,…`, else all pods that have a container port of
an agent. They replace kvctl's options of the same names. The agents are reached by port-forward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from kvctl.__main__ import main as run
from kvctl.client.discovery.kubernetes_source import NAMESPACE, current_namespace
from kvctl.exit_codes import ExitCode


def main() -> None:
    """Runs `kvctl` with the arguments of `kubectl kvctl`."""
    try:
        sys.argv[1:] = kvctl_arguments(sys.argv[1:])
    except ValueError as error:
        print(f"kubectl kvctl: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE) from None
    run()


def kvctl_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of kvctl for those of `kubectl kvctl`.

    Raises:
        ValueError: an option has no value, or the namespace no valid name.
    """
    options = {"--namespace": "", "--context": "", "--selector": ""}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        name = "--namespace" if name == "-n" else name
        if name in options:
            following = value if equals else next(words, None)
            if following is None:
                raise ValueError(f"option {word} has no value")
            options[name] = following
        else:
            rest += [word, *words] if word == "--" else [word]
    context = options["--context"]
    namespace = options["--namespace"] or current_namespace(context)
    if not NAMESPACE.fullmatch(namespace):
        raise ValueError(
            f"a namespace cannot be named {namespace!r}; kubectl get namespaces lists those that there are"
        )
    query = {**({"context": context} if context else {}), "via": "port-forward"}
    return ["-e", f"kubernetes://{namespace}/{quote(options['--selector'])}?{urlencode(query)}", *rest]
