"""`EngineAgent`: the agent of one worker of a serving engine, from what the engine knows at its start.

The integrations for SGLang and vLLM use it, the public names of `kvctl_agent` and the contract, and nothing below: so
can an integration for another engine. docs/engines.md has an example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvctl_agent.agent import Agent
from kvctl_agent.contract.addresses import Address
from kvctl_agent.contract.config import Value
from kvctl_agent.contract.snapshots import Integration, Role
from kvctl_agent.errors import KvctlError
from kvctl_agent.layout.shape import ModelShape, whole_model
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.rank import Axes, Rank, rank_name
from kvctl_agent.telemetry.engine_calls import POLL

_Result = TypeVar("_Result")

_NO_KEY = (
    "kvctl: prefill servers on other hosts need a key: set KVCTL_FLEET_KEY (kvctl key new), or KVCTL_INSECURE=1 on a "
    "network you trust, for both servers"
)


class EngineAgent(Agent):
    """Agent of one worker of a serving engine.

    Args:
        engine: name and version of the engine, the kind of integration (`mode`), and options of the engine that
            `kvctl status` shows and that peers compare.
        role, pool, on_state: as for `Agent`.
        rank: coordinates of the worker; its `stages` are taken from `stages`.
        stages: shape of the KV of each pipeline stage (`KVPool.shape`), gathered by the engine; empty for one stage.
        axes: ranks and sizes on the axes of the server that the name tells.
        server: text that tells this server's ranks from those of others, such as `10.0.0.5:30000`.
        address: IP address or name of this host, or its loopback address if peers are only expected there. Prefill
            ranks listen on it; decode ranks on other hosts than prefill need a key, and the log says so if there is
            none.
        registry: endpoint of the bootstrap registry of a prefill instance; None on decode ranks, which learn it with
            the requests.
        defaults: defaults for this engine of configuration keys. Files and environment override them.
        config: configuration keys whose values the engine determines.

    Raises:
        ConfigError, MemoryLayoutError, LayoutError, DeviceError, TransportUnavailable: as `Agent`.
    """

    def __init__(
        self,
        engine: Integration,
        *,
        role: Role,
        rank: Rank,
        pool: KVPool,
        stages: Sequence[ModelShape] = (),
        axes: Axes,
        tp: int,
        server: str,
        address: str,
        registry: str | None,
        logger: logging.Logger,
        on_state: Callable[..., Any] | None = None,
        defaults: Mapping[str, Value] | None = None,
        **config: Value,
    ) -> None:
        reached_at = Address("tcp", address)
        own: dict[str, Value] = {"name_suffix": server}
        if role == "prefill":
            own["listen"] = reached_at.bracketed_host
        super().__init__(
            role=role,
            rank=replace(rank, stages=tuple(stage.num_layers for stage in stages)),
            pool=pool,
            name=rank_name(role, axes, tp),
            bootstrap=registry,
            model=whole_model(stages) if stages else None,
            on_state=on_state,
            factories=None,
            integration=engine,
            defaults={**own, **(defaults or {})},
            **config,
        )
        self._engine = engine
        self._logger = logger
        if role == "decode" and not (reached_at.is_loopback or self.settings["fleet_key"] or self.settings["insecure"]):
            logger.warning(_NO_KEY)

    def start(self) -> EngineAgent:
        """As `Agent.start`; the engine's log then names the agent."""
        super().start()
        engine = self._engine
        self._logger.info(
            "kvctl: agent %s is running (%s %s, %s); look at it with: kvctl status",
            self.name,
            engine["engine"],
            engine["engine_version"],
            engine["mode"],
        )
        return self

    def note_turn(self) -> None:
        """Notes that the engine's scheduler runs; to be called in each of its turns. It takes less than 1 µs.

        `kvctl status` and the health codes tell an engine that hangs from one that has no requests by it.
        """
        self.telemetry.region.note_call(POLL)

    def is_sending(self, room: int) -> bool:
        """Prefill: whether the number is in use by a room that has not ended, here or at a decode rank."""
        return self.is_open(room) or self.machine.sends(room)


def attempt(call: Callable[[], _Result], fail: Callable[[str], None], logger: logging.Logger) -> _Result | None:
    """Returns the result of a call for one request; None if it raises: then `fail` is called with the cause.

    Keeps an error in one request from the engine that calls an integration, which would end with it. The errors of
    kvctl say what is wrong with the request. Any other one is a bug, whose traceback is logged.
    """
    try:
        return call()
    except KvctlError as error:
        fail(str(error))
    except Exception as error:
        logger.exception("kvctl: a request fails because of an unexpected error")
        fail(f"{type(error).__name__}: {error}")
    return None
