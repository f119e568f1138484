"""`python -m kvctl.lab.ranks`: one rank process of a bench, demo or soak."""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and serves; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvctl.lab.ranks", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket of the parent's channel")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--name", required=True, help="name of the rank, for ps only")
    arguments = parser.parse_args(argv)
    from kvctl_agent.transport.environment import prepare_environment

    # Before an engine is imported: it reads the environment while it loads.
    prepare_environment()
    _block_torch()
    from kvctl.lab.ranks.server import serve

    return serve(arguments.fd, arguments.parent)


def _block_torch() -> None:
    """Makes imports of torch fail: pools on GPUs do not need it, and `gpu_engine`, which does, removes the block.

    Transfer engines import it only for its CUDA version, which costs two seconds of CPU time and 190 MB.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to make its import fail


if __name__ == "__main__":
    sys.exit(main())
