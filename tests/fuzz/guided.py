"""`make fuzz`: atheris (libFuzzer) drives one reader of outside bytes.

`python -m tests.fuzz.guided` names the readers, `… READER FOLDER` fuzzes one, its corpus beginning with the seeds and
growing in that folder, and `… READER FILE` repeats what broke it. Options of libFuzzer may follow the name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvctl", "kvctl_agent", "tests.fuzz.targets"]):
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
