"""Runs one rank process of a bench, demo or soak: `python -m kvctl.lab.ranks`."""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and serves the parent's commands; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvctl.lab.ranks", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket of the parent's channel")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--name", required=True, help="name of the rank, for ps only")
    arguments = parser.parse_args(argv)
    from kvctl_agent.transport.environment import prepare_environment

    # Transfer engines read the environment while they are imported.
    prepare_environment()
    block_torch()
    from kvctl.lab.ranks.server import serve

    return serve(arguments.fd, arguments.parent)


def block_torch() -> None:
    """Makes every import of torch fail.

    KV pools on GPUs do not need torch. Transfer engines import it only to read its CUDA version, which costs two
    seconds of CPU time and 190 MB.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to make an import fail


if __name__ == "__main__":
    sys.exit(main())
