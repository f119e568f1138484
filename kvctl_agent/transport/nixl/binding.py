"""Adapter for NIXL's Python binding: imports it, creates agents and converts NIXL's errors.

The adapter uses the compiled binding and not `nixl_agent`, because the binding accepts descriptor arrays and calls from
any thread.

Agents run without NIXL's progress thread. By default that thread spins, so every agent uses one core permanently, and
on a machine with as many agents as cores a notification takes 8 to 16 ms, because the spinning threads starve those
with work. The thread can also sleep until the engine has work, but then it wakes for every tag and competes with the
posting and polling threads for UCX's spin lock: with eight agents on two cores that took 10 % of all cycles, and a room
took 6.0 ms of CPU time instead of 5.0, its 99th percentile 3 to 7 ms instead of 1.9. The agent has threads that call
the transport anyway, and those calls are sufficient for UCX. Several threads may post: `nixl.threads`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from kvctl_agent.errors import ConfigError, PeerDisconnected, TransportError, TransportUnavailable
from kvctl_agent.transport.engine_errors import unavailable
from kvctl_agent.transport.environment import prepare_environment
from kvctl_agent.transport.fork_safety import disown_in_children

# Parameters that NIXL's UCX backend reads but does not list.
_UNLISTED = frozenset({"num_threads", "split_batch_size", "device_list", "engine_config", "ucx_ep_close_force"})

_STATUS_NAMES = {
    -1: "NIXL_ERR_NOT_POSTED",
    -2: "NIXL_ERR_INVALID_PARAM",
    -3: "NIXL_ERR_BACKEND",
    -4: "NIXL_ERR_NOT_FOUND",
    -5: "NIXL_ERR_MISMATCH",
    -6: "NIXL_ERR_NOT_ALLOWED",
    -7: "NIXL_ERR_REPOST_ACTIVE",
    -8: "NIXL_ERR_UNKNOWN",
    -9: "NIXL_ERR_NOT_SUPPORTED",
    -10: "NIXL_ERR_REMOTE_DISCONNECT",
    -11: "NIXL_ERR_CANCELED",
}
_NEEDED = ("nixlAgent", "nixlAgentConfig", "nixlXferDList", "nixlRegDList", "nixlRemoteDisconnectError")


class Engine(NamedTuple):
    """A NIXL agent that is ready for use.

    Attributes:
        version: Version of the installed wheel, for example "1.5.1".
        errors: All exceptions that the binding raises; each derives directly from Exception.
        enter: Makes the agent's device, if it has one, current on the calling thread; called before every engine call.
            UCX queries the current device when it connects a peer, to check whether its memory can be mapped, and to
            record events. NIXL's UCX plugin does not set it.
    """

    binding: Any
    agent: Any
    version: str
    errors: tuple[type[Exception], ...]
    enter: Callable[[], None]


def load() -> tuple[Any, str]:
    """Imports NIXL (0.2 s the first time).

    Returns:
        The binding and NIXL's version.

    Raises:
        TransportUnavailable: NIXL or a library it needs is missing, or its binding is of an unsupported version.
    """
    prepare_environment()
    # NIXL's Python package logs to the sys.stdout of its import; stdout is for data.
    with contextlib.redirect_stdout(sys.stderr):
        binding, version = import_binding()
    lacking = [name for name in _NEEDED if not hasattr(binding, name)]
    if lacking:
        raise TransportUnavailable(
            f"the binding of nixl {version} lacks {', '.join(lacking)}; kvctl is known to work with nixl 1.5: "
            f"pip install 'nixl>=1.5,<1.6'"
        )
    # The same if other code has imported NIXL before.
    for handler in logging.getLogger("nixl").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    return binding, version


def start(name: str, enter: Callable[[], None]) -> Engine:
    """Creates a NIXL agent called `name`, which has no backend yet; `enter` is as in `Engine`.

    Raises:
        TransportUnavailable: NIXL is missing.
        TransportError: the agent cannot be created.
    """
    binding, version = load()
    errors = _errors(binding)
    config = binding.nixlAgentConfig()
    config.useProgThread = False
    # With this mode, posts and polls of writes share the agent, while connect, disconnect, collecting tags and the
    # engine's own clean-up after a dead peer exclude them. With the wrapper's default (no locks) the latter change maps
    # and lists that a post is using. The mode also makes UCX lock its worker, in which any thread may receive tags.
    config.syncMode = binding.NIXL_THREAD_SYNC_RW
    try:
        agent = binding.nixlAgent(name, config)
    except errors as error:
        raise TransportError(f"nixl {version} could not create an agent: {error}") from error
    disown_in_children(agent)
    return Engine(binding, agent, version, errors, enter)


def add_backend(engine: Engine, backend: str, backend_params: dict[str, str]) -> None:
    """Starts the backend of an agent, with the backend's parameters.

    Raises:
        TransportUnavailable: NIXL does not have the backend.
        ConfigError: the backend does not have a parameter.
        TransportError: the backend cannot start.
    """
    agent, version = engine.agent, engine.version
    try:
        if backend not in agent.getAvailPlugins():
            known = ", ".join(sorted(agent.getAvailPlugins()))
            raise TransportUnavailable(f"nixl {version} has no backend {backend!r}; it has {known}")
        known_params = {*agent.getPluginParams(backend)[0], *(_UNLISTED if backend == "UCX" else ())}
        for key in backend_params:
            if key not in known_params:
                allowed = ", ".join(["backend", *sorted(known_params)])
                raise ConfigError(f"transport_params: nixl's {backend} has no parameter {key!r}; allowed: {allowed}")
        agent.createBackend(backend, backend_params)
    except engine.errors as error:
        raise TransportError(f"nixl {version} could not start its {backend} backend: {error}") from error


def translate(engine: Engine, error: Exception, what: str, peer: str, engine_name: str) -> TransportError:
    """Converts an exception of the binding, whose text is only the name of a status, to an error with a full text.

    Args:
        what: What failed, the beginning of the text, such as "cannot send a tag".
    """
    binding = engine.binding
    gone = isinstance(error, binding.nixlRemoteDisconnectError)
    hint = ""
    if isinstance(error, binding.nixlNotFoundError):
        # Either an address is wrong, or NIXL dropped the peer when another write found it dead.
        gone = engine.agent.checkRemoteMD(engine_name, binding.nixlXferDList(binding.DRAM_SEG)) != binding.NIXL_SUCCESS
        hint = ": an address is not in registered memory"
    if gone:
        return PeerDisconnected(f"nixl: {what}: peer {peer!r} is gone ({error})")
    return TransportError(f"nixl: {what} (peer {peer!r}): {error}{hint}")


def status_error(engine: Engine, status: int) -> Exception:
    """Returns the exception that the binding raises for a negative status of NIXL, or one of its name."""
    named = {-4: "nixlNotFoundError", -10: "nixlRemoteDisconnectError"}
    if status in named:
        error: Exception = getattr(engine.binding, named[status])(_STATUS_NAMES[status])
        return error
    return RuntimeError(_STATUS_NAMES.get(status, f"NIXL status {status}"))


def _errors(binding: Any) -> tuple[type[Exception], ...]:
    """Returns the exceptions that the binding raises: a class per status, and RuntimeError for unknown statuses."""
    named = (getattr(binding, name) for name in dir(binding) if name.startswith("nixl") and name.endswith("Error"))
    return (RuntimeError, *named)


_WHEELS = {13: "nixl_cu13", 12: "nixl_cu12"}


def import_binding() -> tuple[Any, str]:
    """Imports NIXL's compiled binding from the wheel for the CUDA driver, without importing torch.

    There is one wheel per major version of CUDA. NIXL's own package selects the wheel by the version of PyTorch. It may
    import torch for this, which costs 2 s and 200 MB, and may select a build for which the driver is too old. This
    function selects by the driver, or by PyTorch if that is already imported, because then other code in the process
    will get NIXL's own choice and the process must not load two NIXL engines.

    Returns:
        The binding and the version of its wheel.

    Raises:
        TransportUnavailable: no wheel is installed, none for this driver, or a library is missing.
    """
    loaded = _loaded()
    if loaded is not None:
        return loaded, _version(loaded.__name__.partition(".")[0])
    refused: ImportError = ModuleNotFoundError("none of its wheels is installed")
    # A binding built from source, or for other hardware, has no wheel of these names; NIXL's own package imports it.
    for package in (*_by_preference(), "nixl"):
        try:
            binding = importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}._bindings"):
                raise unavailable("nixl", error) from error
            continue
        except ImportError as error:
            refused = error
            break
        return binding, _version(package)
    too_new = _too_new()
    if too_new:
        raise TransportUnavailable(too_new) from refused
    raise unavailable("nixl", refused) from refused


def driver_cuda() -> int | None:
    """Returns the major version of CUDA that the NVIDIA driver supports; None without a driver."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    return None


def _loaded() -> Any | None:
    """Returns the binding that other code in this process has already imported, or None."""
    for package in ("nixl", *_WHEELS.values()):
        binding = sys.modules.get(f"{package}._bindings")
        if binding is not None:
            return binding
    return None


def _by_preference() -> list[str]:
    torch_cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if torch_cuda:
        return [_WHEELS[major] for major in (int(torch_cuda.partition(".")[0]),) if major in _WHEELS]
    serves = driver_cuda()
    return [package for major, package in _WHEELS.items() if serves is None or major <= serves]


def _too_new() -> str:
    """Returns an error text if an installed wheel needs a newer driver than this machine has; "" otherwise."""
    serves = driver_cuda()
    unusable = [package for package in _WHEELS.values() if package not in _by_preference() and _has(package)]
    if serves is None or not unusable:
        return ""
    return (
        f"transport 'nixl': {unusable[0].replace('_', '-')} is installed, but this process needs the build for CUDA "
        f"{min(serves, max(_WHEELS))}: pip install nixl-cu{min(serves, max(_WHEELS))}"
    )


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # its import was blocked
        return False


def _version(package: str) -> str:
    for name in (package.replace("_", "-"), "nixl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"
