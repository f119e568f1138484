"""Writes a pytest file that breaks the same invariant, for as long as the machines do."""

from __future__ import annotations

import re
from pathlib import Path

from kvctl.lab.replay.codegen import Call, Imports, Tree, lines, tree
from kvctl.lab.replay.inputs import Input
from kvctl.lab.replay.invariants import INVARIANTS
from kvctl.lab.replay.recordings import save
from kvctl.lab.replay.shrink import Shorter
from kvctl_agent.contract.recording import InputHeader

SUFFIX = ".kvrec"
_LARGEST = 64 << 10  # characters of inputs that a person would still read


def write_test(path: Path, header: InputHeader, short: Shorter) -> Path:
    """Write the test, and beside it its inputs where they are many or do not begin with a new machine.

    Raises:
        OSError: it cannot be written.
    """
    name = re.sub(r"\W+", "_", f"{header['name']}_{short.breach.invariant}").strip("_").lower()
    text = _inline(name, header, short) if short.fresh else None
    if text is None or len(text) > _LARGEST:
        data = path.with_suffix(SUFFIX)
        save(data, header, short.start, [item._replace(outcome="") for item in short.inputs])
        text = _beside(name, header, short, data.name)
    path.write_text(text, encoding="utf-8")
    return path


def _inline(name: str, header: InputHeader, short: Shorter) -> str:
    imports = Imports()
    checkpoint, clock_offset_ns = short.start
    arguments = [
        tree(checkpoint.local, imports),
        tree(checkpoint.timing, imports),
        f"clock_offset_ns={clock_offset_ns}",
    ]
    if checkpoint.state.get("holds_back", False):
        arguments.append("early_send=False")
    start = lines(Call("Start.fresh(", arguments, ")"), first="START = ")
    inputs = lines(Call("[", [_input(item, imports) for item in short.inputs], "]"), first="INPUTS = ")
    own = [*imports.lines(), "from kvctl.lab.replay import Input, Start, play"]
    numpy = ["import numpy as np", ""] if imports.numpy else []
    return "\n".join([*_head(header, short), *numpy, *sorted(own, key=_module), "", *start, "", *inputs, *_test(name)])


def _input(item: Input, imports: Imports) -> Tree:
    arguments = [str(item.number), str(item.now_ns), tree(item.event, imports)]
    if item.asked:
        arguments.append(tree(item.asked, imports))
    return Call("Input(", arguments, ")")


def _beside(name: str, header: InputHeader, short: Shorter, data: str) -> str:
    own = ["from pathlib import Path", "", "from kvctl.lab.replay import play, recorded", ""]
    where = f'START, INPUTS = recorded(Path(__file__).with_name("{data}"))'
    return "\n".join([*_head(header, short), *own, where, *_test(name)])


def _head(header: InputHeader, short: Shorter) -> list[str]:
    breach = short.breach
    what = f"{header['name']} (kvctl {header['version']}, incarnation {header['incarnation']})"
    text = f"{what} broke {breach.invariant}: {INVARIANTS[breach.invariant]}."
    told = [line for part in (text, breach.text) for line in _wrapped(part)]
    return [
        '"""Written by `kvctl replay --write-test`.',
        "",
        *told,
        '"""',
        "",
        "from __future__ import annotations",
        "",
    ]


def _wrapped(text: str) -> list[str]:
    safe = text.encode("ascii", "backslashreplace").decode().replace("\\", "/").replace('"', "'")
    return [line.rstrip() for line in re.findall(r"\S.{0,108}(?:\s|$)|\S{1,109}", safe.replace("\n", " "))]


def _test(name: str) -> list[str]:
    return [
        "",
        "",
        f"def test_{name}() -> None:",
        "    breach = play(START, INPUTS).breach",
        "    assert breach is None, breach",
        "",
    ]


def _module(line: str) -> str:
    return line.split()[1]
