"""The only module that knows how NIXL's Python binding looks; the transport itself sees an agent and errors.

We use the compiled binding and not `nixl_agent`: it takes arrays of descriptors and threads of ours as they are.

Agents run without NIXL's progress thread. By default it spins, so every agent burns one core for ever, and on a
machine with as many agents as cores a notification takes 8 to 16 ms, because the spinning threads starve the ones
with work. It can be made to sleep until the engine has something; but then it wakes for every tag and fights with
the threads that post and poll for UCX's spin lock: with eight agents on two cores that took 10 % of all cycles, and
a room 6.0 ms of CPU time instead of 5.0, its 99th percentile 3 to 7 ms instead of 1.9. The agent's user has threads
that call in anyway, and those calls are all that UCX needs.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from kvctl_agent.errors import ConfigError, PeerDisconnected, TransportError, TransportUnavailable
from kvctl_agent.transport.environment import prepare_environment
from kvctl_agent.transport.fork_safety import disown_in_children
from kvctl_agent.transport.nixl.wheels import import_binding

# What NIXL's UCX backend reads besides the parameters it lists itself.
_UNLISTED = frozenset({"num_threads", "split_batch_size", "device_list", "engine_config", "ucx_ep_close_force"})

_NEEDED = ("nixlAgent", "nixlAgentConfig", "nixlXferDList", "nixlRegDList", "nixlRemoteDisconnectError")


class Engine(NamedTuple):
    """A NIXL agent that is ready for use.

    Attributes:
        binding: NIXL's compiled module.
        agent: its `nixlAgent`.
        version: of the installed wheel, as "1.5.1".
        errors: all exceptions the binding raises; each derives from Exception alone.
        enter: makes the agent's device, if it has one, the calling thread's, in front of every call of the engine.
            UCX asks the driver for it: to see, while a peer is connected, whether its memory can be mapped, and to
            record events. Its NIXL plugin leaves that to its user.
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
        TransportUnavailable: NIXL or a library it needs is missing, or its binding is not one we know.
    """
    prepare_environment()
    # NIXL's Python half logs to what sys.stdout is while it is imported; stdout is data.
    with contextlib.redirect_stdout(sys.stderr):
        binding, version = import_binding()
    lacking = [name for name in _NEEDED if not hasattr(binding, name)]
    if lacking:
        raise TransportUnavailable(
            f"the binding of nixl {version} lacks {', '.join(lacking)}; kvctl is known to work with nixl 1.5: "
            f"pip install 'nixl>=1.5,<1.6'"
        )
    # The same, where someone imported NIXL before us.
    for handler in logging.getLogger("nixl").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    return binding, version


def start(name: str, backend: str, backend_params: dict[str, str], enter: Callable[[], None]) -> Engine:
    """Creates an agent called `name` with one backend; `enter` as in `Engine`.

    Raises:
        TransportUnavailable: NIXL is missing, or has no such backend.
        ConfigError: the backend has no such parameter.
        TransportError: the backend cannot start.
    """
    binding, version = load()
    errors = _errors(binding)
    config = binding.nixlAgentConfig()
    config.useProgThread = False
    # Posts and polls of writes share the agent; connect, disconnect, collecting tags and the engine's own clean-up
    # after a dead peer exclude them. With the wrapper's default (no locks) those change maps and lists that a post
    # is using. It also makes UCX lock its worker, inside which tags are received whoever drives it.
    config.syncMode = binding.NIXL_THREAD_SYNC_RW
    try:
        agent = binding.nixlAgent(name, config)
        disown_in_children(agent)
        if backend not in agent.getAvailPlugins():
            known = ", ".join(sorted(agent.getAvailPlugins()))
            raise TransportUnavailable(f"nixl {version} has no backend {backend!r}; it has {known}")
        known_params = {*agent.getPluginParams(backend)[0], *(_UNLISTED if backend == "UCX" else ())}
        for key in backend_params:
            if key not in known_params:
                allowed = ", ".join(["backend", *sorted(known_params)])
                raise ConfigError(f"transport_params: nixl's {backend} has no parameter {key!r}; allowed: {allowed}")
        agent.createBackend(backend, backend_params)
    except errors as error:
        raise TransportError(f"nixl {version} could not start its {backend} backend: {error}") from error
    return Engine(binding, agent, version, errors, enter)


def translate(engine: Engine, error: Exception, what: str, peer: str, engine_name: str) -> TransportError:
    """Our error for one of NIXL's, whose text is only the name of a status.

    Args:
        engine: where it happened.
        error: one of `engine.errors`.
        what: what failed.
        peer: our name for the peer.
        engine_name: NIXL's name for it.
    """
    binding = engine.binding
    gone = isinstance(error, binding.nixlRemoteDisconnectError)
    hint = ""
    if isinstance(error, binding.nixlNotFoundError):
        # Either a wrong address, or NIXL dropped the peer when another write found it dead.
        gone = engine.agent.checkRemoteMD(engine_name, binding.nixlXferDList(binding.DRAM_SEG)) != binding.NIXL_SUCCESS
        hint = ": an address is not in registered memory"
    if gone:
        return PeerDisconnected(f"nixl: {what}: peer {peer!r} is gone ({error})")
    return TransportError(f"nixl: {what} (peer {peer!r}): {error}{hint}")


def _errors(binding: Any) -> tuple[type[Exception], ...]:
    """One class per status; a status that the binding does not know comes as a RuntimeError."""
    named = (getattr(binding, name) for name in dir(binding) if name.startswith("nixl") and name.endswith("Error"))
    return (RuntimeError, *named)
