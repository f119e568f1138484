"""The only module that knows how NIXL's Python binding looks; the transport itself sees an agent and errors.

We use the compiled binding and not `nixl_agent`, because that wrapper fixes the progress thread's delay at 0,
with which the thread spins: every agent then burns one core for ever, and on a machine with as many agents as
cores a notification takes 8 to 16 ms, because the spinning threads starve the ones with work. The delay has no
public setting, so it is set here, on the binding's own configuration object, and checked against the version.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import sys
from typing import Any, NamedTuple

from kvctl_agent.errors import ConfigError, PeerDisconnected, TransportError, TransportUnavailable
from kvctl_agent.transport.environment import prepare_environment
from kvctl_agent.transport.missing import unavailable

PROGRESS_DELAY_US = 5000
"""Longest sleep of the progress thread.

Measured with two processes on two cores, 1 / 5 / 20 / 100 ms: an idle agent that nobody polls takes 1.5 / 0.5 /
0.2 / 0.06 % of a core, polled every 5 ms it takes 1.9 / 1.1 / 0.9 / 0.8 %; the notification round trip does not
depend on it (160 µs with 50 µs sleeps), since events wake the thread. While two agents wire up some events are
missed and only the timeout helps: the first write takes 17, 18 and 50 ms with 1, 5 and 20 ms. So 5 ms: as fast
as 1 ms, at a third of its cost for the other processes of a busy machine.
"""

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
    """

    binding: Any
    agent: Any
    version: str
    errors: tuple[type[Exception], ...]


def load() -> tuple[Any, str]:
    """Imports NIXL (1.5 s the first time).

    Returns:
        The binding and NIXL's version.

    Raises:
        TransportUnavailable: NIXL or a library it needs is missing, or its binding is not one we know.
    """
    prepare_environment()
    try:
        # NIXL's Python half logs to what sys.stdout is while it is imported; stdout is data.
        with contextlib.redirect_stdout(sys.stderr):
            from nixl import _bindings as binding
    except ImportError as error:
        raise unavailable("nixl", error) from error
    version = importlib.metadata.version("nixl")
    lacking = [name for name in _NEEDED if not hasattr(binding, name)]
    if not hasattr(binding.nixlAgentConfig, "pthrDelay"):
        lacking.append("nixlAgentConfig.pthrDelay")
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


def start(name: str, backend: str, backend_params: dict[str, str]) -> Engine:
    """Creates an agent called `name` with one backend.

    Raises:
        TransportUnavailable: NIXL is missing, or has no such backend.
        ConfigError: the backend has no such parameter.
        TransportError: the backend cannot start.
    """
    binding, version = load()
    errors = _errors(binding)
    config = binding.nixlAgentConfig()
    # With a progress thread an idle target wires up and receives without being called; without one, a writer's
    # first write waits until the target happens to poll.
    config.useProgThread = True
    # The thread sleeps in poll() on the engine's event descriptor and wakes by itself after this long at the
    # latest; 0 means that it never sleeps.
    config.pthrDelay = PROGRESS_DELAY_US
    # Posts and polls share the agent; connect, disconnect and the engine's own clean-up after a dead peer
    # exclude them. With the wrapper's default (no locks) those change maps that a post is reading.
    config.syncMode = binding.NIXL_THREAD_SYNC_RW
    try:
        agent = binding.nixlAgent(name, config)
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
    return Engine(binding, agent, version, errors)


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
