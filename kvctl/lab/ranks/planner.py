"""Plans a fleet and builds each rank's Start command.

The agent's layout code, and numpy with it, is imported by the first call: commands that plan nothing do not pay for it.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.lab.ranks.messages import Start
from kvctl.lab.ranks.plan import Plan, PlannedRank
from kvctl.lab.ranks.request import PlanRequest

_IMPORT_S = 60.0
_IMPORT_MOONCAKE = """
import sys
from kvctl_agent.errors import ConfigError, TransportUnavailable
from kvctl_agent.transport.mooncake.engine import import_engine
try:
    import_engine()
except (ConfigError, TransportUnavailable) as error:
    print(error, file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)
"""


def plan(request: PlanRequest) -> Plan:
    """Resolves a request into a plan; imports neither torch nor NIXL.

    Raises:
        CliError: the request is impossible (exit 2, with the arithmetic), or a package that the fleet needs is not
            installed (exit 1).
    """
    try:
        from kvctl.lab.ranks.resolve import make_plan
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
    """Builds the Start command of a planned rank.

    Args:
        directory: the fleet's directory; the registries of the prefill instances are sockets in it.
        timeout_s: time that the rank may wait for its peers.
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
    """Checks that a transport's engine is installed. A system library that NIXL lacks is reported by the ranks.

    Raises:
        CliError: the package is missing, too old or lacks a library, or an environment variable is set that crashes
            the engine.
    """
    if transport == "mooncake":
        # The package may be present without the engine, and the engine without a library: only an import shows it, and
        # it leaves threads, descriptors and signal handlers behind. So it runs in a separate process (0.3 s).
        command = [sys.executable, "-c", _IMPORT_MOONCAKE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_S)
        except subprocess.TimeoutExpired as error:
            raise CliError(f"importing mooncake did not finish within {_IMPORT_S:g} s") from error
        if done.returncode != 0:
            code = ExitCode.USAGE if done.returncode == ExitCode.USAGE else ExitCode.FAILED
            raise CliError(done.stderr.strip() or "mooncake cannot be imported", code)
    elif transport != "loopback" and find_spec(transport) is None:
        from kvctl_agent.transport.engine_errors import unavailable

        raise CliError(str(unavailable(transport, ModuleNotFoundError(f"No module named {transport!r}"))))
