"""Plans a fleet and builds the Start command of each rank.

The agent's layout code, which needs numpy, is imported by the first call to `plan`, so that other commands start fast.
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
from kvctl_agent.contract.extras import engine_extra, install

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
    """Resolves a request into a plan, without importing torch or NIXL.

    Raises:
        CliError: the request is impossible (exit code 2; the message contains the arithmetic), or a package that the
            fleet needs is not installed (exit code 1).
    """
    try:
        from kvctl.lab.ranks.resolve import make_plan
        from kvctl_agent.errors import ConfigError, DeviceError, LayoutError
    except ModuleNotFoundError as error:
        hint = install(engine_extra(request.transport))
        raise CliError(f"the agent's side is not installed ({error}): {hint}") from error
    try:
        made = make_plan(request)
    except (LayoutError, ConfigError) as error:
        raise CliError(str(error), ExitCode.USAGE) from error
    except DeviceError as error:
        raise CliError(str(error)) from error
    _require_engine(request.transport)
    return made


def rank_start(plan: Plan, request: PlanRequest, rank: PlannedRank, name: str, directory: str | Path) -> Start:
    """Builds the Start command of a planned rank.

    Args:
        directory: the fleet's private directory, which contains the registry socket of each prefill instance.
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
        page_size=request.page_tokens(rank["role"]),
        page_order=plan["page_order"],
        pool_pages=rank["pool_pages"],
        state_slots=rank["state_slots"],
        aux_slots=plan["aux_slots"],
        seed=request.seed,
        config=plan["config"],
        device=rank["device"],
        transfer_page=plan["transfer_page"],
        state_page_size=plan["page_size"],
        kv_layout=plan["kv_layouts"][rank["role"] == "decode"],
    )


def _require_engine(transport: str) -> None:
    """Checks that the Python package of a transport is installed.

    For Mooncake, also checks that the package can be imported. For NIXL, a missing system library is only detected by
    the ranks.

    Raises:
        CliError: the package is missing, too old or lacks a library, or an environment variable is set that crashes
            the engine.
    """
    if transport == "mooncake":
        # The package may lack the engine, and the engine may lack a library, which only an import shows. The import
        # leaves threads, descriptors and signal handlers behind, so it runs in a separate process (0.3 s).
        command = [sys.executable, "-P", "-c", _IMPORT_MOONCAKE]
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
