"""Runs atheris (libFuzzer) on one parser of outside data; used by `make fuzz`.

`python -m tests.fuzz.guided` lists the parsers; `… READER FOLDER` fuzzes one, with a corpus in that folder that starts
with the seeds; `… READER FILE` repeats a crash. Options of libFuzzer may follow the name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvctl", "kvctl_agent", "tests.fuzz.targets", "tests.fuzz.entry_points"]):
    from tests.fuzz.seeds import SEEDS
    from tests.fuzz.targets import TARGETS


def main() -> None:
    if len(sys.argv) == 1:
        print(*TARGETS)
        return
    name, *options = sys.argv[1:]
    corpus = next((Path(option) for option in options if not option.startswith("-")), None)
    if corpus is not None and corpus.is_dir():
        for number, seed in enumerate(SEEDS[name]):
            (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
