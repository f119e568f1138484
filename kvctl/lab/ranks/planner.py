"""Plans the ranks, pools and loads of a fleet, and what each rank is told.

The agent's layout code is imported on the first call: commands that plan nothing must not pay for numpy.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.lab.ranks.bench_messages import Plan, PlannedRank, PlanRequest, Start

_IMPORT_MOONCAKE = """
import sys
from kvctl_agent.errors import ConfigError, TransportUnavailable
from kvctl_agent.transport.mooncake.wheels import import_engine
try:
    import_engine()
except (ConfigError, TransportUnavailable) as error:
    print(error, file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)
"""


def plan(request: PlanRequest) -> Plan:
    """Resolve a request; imports neither torch nor NIXL.

    Raises:
        CliError: the request cannot be served (exit 2, with the arithmetic), or a package that the fleet needs is not
            installed (exit 1).
    """
    try:
        from kvctl.lab.ranks.plan import make_plan
        from kvctl_agent.errors import ConfigError, DeviceError, LayoutError
    except ModuleNotFoundError as error:
        raise CliError(f"the agent's side is not installed ({error}): pip install 'kvctl[agent]'") from error
    try:
        made = make_plan(request)
    except (LayoutError, ConfigError) as error:
        raise CliError(str(error), ExitCode.USAGE) from error
    except DeviceError as error:
        raise CliError(str(error)) from error
    if request.compute == "gpu" and find_spec("torch") is None:
        raise CliError("--compute gpu needs PyTorch: pip install 'kvctl[agent]' with a CUDA build of torch")
    _require_engine(request.transport)
    return made


def rank_start(
    plan: Plan, request: PlanRequest, rank: PlannedRank, name: str, directory: str | Path, timeout_s: float
) -> Start:
    """The command that tells a planned rank who it is.

    Args:
        directory: of the fleet; the registries of the prefill instances are sockets in it.
        timeout_s: how long the rank may wait for its peers.
    """
    return Start(
        name=name,
        fleet_dir=str(directory),
        role=rank["role"],
        instance=rank["instance"],
        unique=rank["unique"],
        prefill=request.prefill,
        bootstraps=tuple(f"ipc://{directory}/bootstrap-{instance}" for instance in range(len(request.prefill))),
        decode=request.decode,
        shape=plan["shape"],
        page_size=plan["page_size"],
        page_order=plan["page_order"],
        pool_pages=rank["pool_pages"],
        state_slots=rank["state_slots"],
        aux_slots=plan["aux_slots"],
        seed=request.seed,
        config=plan["config"],
        timeout_s=timeout_s,
        faulty=bool(request.faults),
        device=rank["device"],
        compute=plan["compute"],
    )


def _require_engine(transport: str) -> None:
    """Check that a transport's engine is installed; a system library that NIXL lacks shows when a rank starts.

    Raises:
        CliError: the package is missing, too old or lacks a library, or an environment variable is set that the
            engine does not survive.
    """
    if transport == "mooncake":
        # Its folder may exist without the engine, and the engine without a library: only importing it tells, and
        # leaves threads, descriptors and signal handlers behind. So a process of its own does (0.3 s).
        done = subprocess.run([sys.executable, "-c", _IMPORT_MOONCAKE], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            code = ExitCode.USAGE if done.returncode == ExitCode.USAGE else ExitCode.FAILED
            raise CliError(done.stderr.strip() or "mooncake cannot be imported", code)
    elif transport != "loopback" and find_spec(transport) is None:
        from kvctl_agent.transport.missing_engine import unavailable

        raise CliError(str(unavailable(transport, ModuleNotFoundError(f"No module named {transport!r}"))))
