"""`python -m kvctl.lab.ranks plan` answers a bench's request; `... rank` is one process of its fleet, `... steady` one
of a fleet that lives on.

`plan` reads a `PlanRequest` from stdin and writes a `PlanReply` to stdout; it imports neither torch nor an engine that
is slow to import, and says so where what a fleet needs is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec

from kvctl.lab.ranks.bench_messages import PlanError, PlanReply
from kvctl_agent.errors import ConfigError, DeviceError, DeviceUnavailable, LayoutError, TransportUnavailable


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and do one of the two; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvctl.lab.ranks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan", help="request on stdin, plan on stdout")
    for kind, text in (("rank", "serve a bench"), ("steady", "serve a fleet that lives on")):
        rank = commands.add_parser(kind, help=text)
        rank.add_argument("--fd", type=int, required=True, help="inherited socket to who started it")
        rank.add_argument("--parent", type=int, required=True, help="process id of who started it")
        rank.add_argument("--name", required=True, help="shown by ps; the real one is sent")
    arguments = parser.parse_args(argv)
    if arguments.command == "plan":
        sys.stdout.write(json.dumps(answer(sys.stdin.buffer.read())) + "\n")
        return 0
    from kvctl_agent.transport.environment import prepare_environment

    # Before an engine is imported: it reads it while it loads.
    prepare_environment()
    _do_without_torch()
    if arguments.command == "steady":
        from kvctl.lab.ranks.steady.rank import serve
    else:
        from kvctl.lab.ranks.rank import serve

    return serve(arguments.fd, arguments.parent)


def _do_without_torch() -> None:
    """Keep torch out of this process: pools on GPUs need none either, and `compute_gpu`, which does, lets it in.

    Engines import it only to ask it for its CUDA version, which costs two seconds of processor time and 190 MB.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to make its import fail


def answer(request: bytes) -> PlanReply:
    """The plan, or why there is none."""
    try:
        import msgspec

        from kvctl.lab.ranks.bench_messages import PlanRequest
        from kvctl.lab.ranks.plan import make_plan

        plan = make_plan(msgspec.json.decode(request, type=PlanRequest))
        _require(plan["transport"], plan["compute"])
    except (LayoutError, ConfigError) as error:
        return PlanReply(error=PlanError(code="usage", message=str(error)))
    except (TransportUnavailable, DeviceError) as error:
        return PlanReply(error=PlanError(code="unavailable", message=str(error)))
    except ModuleNotFoundError as error:
        message = f"the agent's side is not installed ({error}): pip install 'kvctl[agent]'"
        return PlanReply(error=PlanError(code="unavailable", message=message))
    return PlanReply(plan=plan)


def _require(transport: str, compute: str) -> None:
    """Refuse before a fleet is started; a library that NIXL lacks is found when it starts.

    Raises:
        TransportUnavailable: the engine's package is not installed, or not as it must be.
        DeviceUnavailable: what computes on a GPU is not.
    """
    if compute == "gpu" and find_spec("torch") is None:
        raise DeviceUnavailable("--compute gpu needs PyTorch: pip install 'kvctl[agent]' with a CUDA build of torch")
    from kvctl_agent.transport.missing_engine import unavailable

    if transport == "mooncake":
        # Its folder may be there without its engine, and its engine without a library: seen by importing it, in 25 ms.
        from kvctl_agent.transport.mooncake.wheels import import_engine

        import_engine()
    elif transport != "loopback" and find_spec(transport) is None:
        raise unavailable(transport, ModuleNotFoundError(f"No module named {transport!r}"))


if __name__ == "__main__":
    sys.exit(main())
