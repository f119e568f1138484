"""Writes the SBOMs (bills of materials) of the wheels, in CycloneDX's format, beside them.

They list what the wheels need, directly and indirectly, with the versions that `make setup` installed, which are those
that the tests ran with. Run by the Python of `.venv`; `make release-check` does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvctl_agent.contract import VERSION

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Writes a bill for each distribution."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, required=True, help="directory of cyclonedx-py")
    parser.add_argument("--dist", type=Path, required=True, help="directory of the wheels")
    arguments = parser.parse_args()
    # Both distributions are one in the checkout's own install; its extra `agent` has what kvctl-agent needs.
    for name, tree, extras in (("kvctl", "kvctl", ()), ("kvctl-agent", "kvctl-agent-*", ("agent",))):
        pinned = "".join(f"{line}\n" for line in sorted(closure("kvctl", extras)))
        bill = arguments.dist / f"{name}-{VERSION}.cdx.json"
        project = next((ROOT / "build" / "wheels").glob(f"{tree}/pyproject.toml"))  # alike for all processors
        command = [arguments.tools / "cyclonedx-py", "requirements", "--pyproject", project, "--output-reproducible"]
        # It warns that the bill has no graph of dependencies: a list is all that a scanner needs.
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        subprocess.run([*command, "-o", bill, "-"], input=pinned, text=True, check=True, env=environment)
        print(f"release-check: {bill}: {len(pinned.splitlines())} packages")


def closure(root: str, extras: Iterable[str]) -> set[str]:
    """Returns all packages that an installed distribution with extras needs, as `name==version`."""
    wanted = [(root, extra) for extra in ("", *extras)]
    seen = set(wanted)
    while wanted:
        name, extra = wanted.pop()
        for requirement in map(Requirement, distribution(name).requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = canonicalize_name(requirement.name)
                fresh = {(needed, each) for each in ("", *requirement.extras)} - seen
                seen |= fresh
                wanted += fresh
    return {f"{name}=={distribution(name).version}" for name, _ in seen if name != root}


if __name__ == "__main__":
    main()
