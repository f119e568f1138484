"""Command lines that are refused: nothing on stdout, nothing is done, and words that help on stderr."""

from __future__ import annotations

import shlex
from types import ModuleType
from typing import Any

import pytest

# By exit code, a command line and what is said of it. The fleet has the ranks prefill-0, prefill-1, decode-0, decode-1.
REFUSED: dict[int, dict[str, str]] = {
    2: {
        "stauts": "did you mean 'kvctl status'?",
        "rooms hsitory": "did you mean 'kvctl rooms history'?",
        "rooms --filter age>5": "age needs a unit",
        "rooms --columns stat": "did you mean state or state_age?",
        "rooms show -1": "No such option",
        "rooms show 18446744073709551616": "not a room number",
        "rooms show": "Missing argument 'ROOM'",
        "rooms -o prom": "-o prom is for metrics",
        "rooms -o xml": "'xml' is not one of",
        "status -l colour=red": "with a key of role, dp",
        "status --timeout soon": "--timeout: 'soon' is not a duration",
        "status -w 0": "--watch: '0' is shorter than a millisecond",
        "status -e tcp://h:1": "create one with `kvctl key new`",
        "events --since yesterday": "--since",
        "completion": "Choose from: bash, zsh, fish\n",
        "wait": "Missing option '--for'",
        "wait --for redy": "'redy' is not one of 'ready', 'drained'",
        "wait --for ready --timeout soon": "--timeout: 'soon' is not a duration",
        f"wait --for ready --from {__file__}": "needs live agents",
        "doctor -w": "",
        f"doctor --host-only --from {__file__}": "",
        f"doctor --from {__file__} -- vllm serve M": "",
        "doctor -- ls": "",
        "doctor --url http://node-0:8000 --host-only": "--url examines servers that run",
        "doctor --url http://node-0:8000 -- vllm serve MODEL": "--url examines servers that run",
        "doctor --url tcp://node-0:8000": "--url takes http://",
        "doctor --url file:///etc/passwd": "--url takes http://",
        "health explain zzz": "kvctl health codes",
        "health explain peer-lots": "did you mean KV_PEER_LOST",
        "health --ignore KV_PEER_LST": "did you mean KV_PEER_LOST",
        "health --ignore zzz": "kvctl health codes",
        "help stauts": "did you mean 'kvctl status'?",
        "help optons": "did you mean 'kvctl help options'?",
        "help coloumns rooms": "did you mean 'kvctl help columns'?",
        "help rooms shwo": "did you mean 'kvctl rooms show'?",
        "help status more": "kvctl status has no subcommands, so there is no 'more'",
        "config explain copy_thread": "did you mean copy_threads",
        # Those that act.
        "rooms abort 18446744073709551616 --yes": "'18446744073709551616' is not a room number",
        f"rooms abort 1 --reason {'x' * 501} --yes": "at most 500",
        "rooms abort --yes": "name rooms, or select them with --filter",
        "rooms abort 1 --filter age>5s --yes": "name rooms, or select them with --filter",
        "rooms abort --filter age --yes": "is not COLUMN OPERATOR VALUE",
        "rooms abort --filter result=done --yes": "no column 'result' here",
        "staging release decode-0 --yes": "'decode-0' is not AGENT:SERIAL",
        "staging release decode-0:0 --yes": "is not AGENT:SERIAL",
        "staging release --yes": "name one allocation (AGENT:SERIAL), or a room with --room",
        "staging release decode-0:7 --room 1 --yes": "name one allocation",
        "peers probe --bytes much": "much",
        "peers probe -w 1": "acts once",
    },
    1: {
        "peers diff prefill-0 decode-7": (
            "no agent named decode-7 answers; there are: decode-0, decode-1, prefill-0, prefill-1"
        ),
        "rooms abort 12 --yes": "no agent knows room 12",
        "rooms abort x --yes": "no agent knows a room of request x: kvctl rooms -o wide",
        "staging release --room 12 --yes": "no decode rank knows room 12",
        "staging release decode-1:7 -e decode-0 --yes": "no agent named decode-1 answers; there are: decode-0",
        "peers probe decode-0": "no prefill rank named decode-0 answers; there are: none",
        "peers probe prefill-0 decode-1": "prefill-0 is not connected to decode-1",
    },
    3: {
        "staging release decode-7:7 --yes": "did you mean",
        "drain decode-7 --yes": "did you mean",
        "drain -l role=decode,tp=9 --yes": "no agent has the labels role=decode,tp=9",
        "peers probe prefill-9": "did you mean",
    },
}
# Of options each refusal of a type, a parser and the planner has its own tests.
REFUSED_HERE = {
    "bench --page-size 0": "'--page-size': 0 is not in the range x>=1",
    "bench --page-size 99999999999": ("--page-size is 99999999999: it must be a whole number from 1 to 2147483647"),
    "bench --draft-layers -1": "'--draft-layers': -1 is not in the range x>=0",
    "bench --layer-ms nan": "--layer-ms nan: it must be 0 or more",
    "bench --kv-group swa:layers=2,size=16": "field 'size' is unknown",
    "bench --model lama-3.1-8b": "did you mean llama-3.1-8b",
    "bench --transport nixel": "did you mean nixl",
    "bench --sweep tokens=1 --sweep tokens=2": "swept once",
    "bench --prefill-instances tp4,tp3": "8 % 3 = 2",
    "bench --prefill-instances tp4 --prefill-tp 2": "every instance: leave out --prefill-tp",
    "bench --prefill-instances tp4 --prefill-pp-layers 2,2": "leave out --prefill-pp-layers",
    "bench --prefill-pp 3 --prefill-pp-layers 10,22": "--prefill-pp-layers: 10,22 are 2 stages, but --prefill-pp is 3",
    "bench --cp-interleave 8": "only with --decode-cp 2",
    "bench --pipeline onn": "did you mean on",
    "bench --rate 0": "not in the range",
    "bench --device gpu": "'gpu' is not one of",
    "bench --device cuda --prefill-gpus a": "nvidia-smi -L lists them",
    "bench --point-seconds 0": "not in the range",
    "bench --columns speed": "speed",
    "demo --fault control-los=5%": "did you mean control-loss",
    "demo --fault stuckroom": "'stuckroom' is not a fault, did you mean stuck-room",
    "demo --fault dead-peer,gated-empty": "gated-empty can run alone only: it stops all other traffic",
    "demo --fault compat --fault oversized-chunk": "cannot run at the same time: both change decode-1",
    "demo --fault pinned-ring,bootstrap": "they need different values of prefill_instances",
    "demo --fault mystery": "'mystery' is not a fault; kvctl demo --list-faults lists them",
    "demo --list-faults --columns speed": "speed",
    "demo --fault kill=decode-7@5s": "there is no rank decode-7; the ranks are prefill-0, prefill-1",
    "demo --fault replace=decode-0@5s+9s": "replace=decode-0@5s+9s: only a prefill rank without",
    "demo --fault replace=prefill-0@5s+9s": "the registry can be replaced: prefill-1",
    "demo --fault control-loss=1% --fault control-loss=2%": "control-loss",
    "demo --tokens 5..1": "5..1",
    "demo --prefill-instances tpx": "tpx",
    "demo --prefill-tp 3": "3",
    "demo --columns speed": "speed",
    "tune --page-sizes 16,x": "write sizes such as 16,64",
    "tune --page-sizes 0": "write sizes such as 16,64",
    "tune --transport nixl,loopback": "one transport",
    "tune --prefill-tp 3 --decode-tp 7": "3",
    "tune --columns speed": "speed",
    "preflight a b c d": "give the layout, for example --prefill-tp 2 --decode-dp 2",
    "preflight a a": "a is given twice",
    "preflight -- -oProxyCommand=x": "is not a host",
    "preflight 'a;b'": "is not a host",
    "preflight a=b": "'b' is not an IP address",
    "preflight a --env UCX_TLS": "write NAME=VALUE",
    "preflight a --python \"'/my python'\"": "a shell on the host would interpret",
    "preflight a --port 0": "--port",
    "preflight a --deadline 0": "shorter than 100ms",
    "preflight a --deadline 50ms": "shorter than 100ms",
    "preflight a --manifest ''": "no image is given",
    "preflight a --transport loopback": "loopback",
    "preflight a --columns speed": "speed",
    "preflight a --prefill-tp 3 --decode-tp 7": "3",
    "preflight": "HOST",
}


def wrong(refused: dict[str, str], code: int, kvctl: Any) -> list[tuple[str, Any]]:
    """Returns the lines that are not refused as they should be, with what they do."""
    found = {line: kvctl(*shlex.split(line)) for line in refused}
    return [
        (line, each)
        for line, each in found.items()
        if (each.code, each.out) != (code, "") or refused[line] not in each.err or "Traceback" in each.err
    ]


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_be_asked_is_refused_with_words_that_help(
    code: int, start: Any, canned: ModuleType, kvctl: Any
) -> None:
    done: list[dict[str, Any]] = []

    def change(args: dict[str, Any]) -> list[Any]:
        done.append(args)
        return []

    for name in canned.FLEET:
        start(name, dict.fromkeys(canned.operations(name), change))
    assert wrong(REFUSED[code], code, kvctl) == []
    assert done == []


def test_what_cannot_be_started_is_refused_with_words_that_help(kvctl: Any) -> None:
    assert wrong(REFUSED_HERE, 2, kvctl) == []
