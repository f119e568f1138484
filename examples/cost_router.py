"""A toy router that chooses the decode rank of each prompt by the transfer times that kvctl's agents predict.

It starts a prefill and two decode ranks on this machine, real processes of which the second decode rank takes arrivals
late, and sends the same prompts by round robin and by predicted cost. Printed is the mean time until decode has a
prompt. `Agent` and `CostRouter` are what a router needs of it: docs/routers.md describes the fields.

    python examples/cost_router.py
    python examples/cost_router.py --prompts 100 --late-ms 20 --transport loopback
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import zmq

from kvctl.lab.demo.fleet import CALM_TIMINGS, FleetPlan, LiveFleet
from kvctl.lab.ranks.messages import Open, Room
from kvctl.lab.ranks.request import Sizes
from kvctl_agent.contract.admin import socket_path

TIMEOUT_S = 60.0
TOKENS = (64, 4096)
REFRESH_S = 0.2  # a fleet that serves for longer than this example needs to be asked once a second
FEWEST_ROOMS = 4  # until a pair has had so many, it is given prompts in order to be measured


class Agent:
    """Admin socket of an agent; for tcp:// addresses, `key` and `server_key` are files of `kvctl key new`."""

    def __init__(self, address: str, key: str = "", server_key: str = "", timeout_ms: int = 1000) -> None:
        self.address, self.timeout_ms, self.asked = address, timeout_ms, 0
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if key:
            own = tomllib.loads(Path(key).read_text())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(own["public"]))
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(own["secret"]))
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(Path(server_key).read_text().split()[0]))
        self.socket.connect(address)

    def ask(self, command: str, **args: Any) -> Any:
        self.asked += 1
        number = b"%d" % self.asked
        connected = self.socket.poll(self.timeout_ms, zmq.POLLOUT)  # no longer, once the agent has refused the key
        if connected:
            self.socket.send_multipart([b"KVA1", number, json.dumps({"cmd": command, "args": args}).encode()])
        while connected and self.socket.poll(self.timeout_ms):
            _, answered, body = self.socket.recv_multipart()
            if answered == number:  # otherwise it answers an earlier request, which has timed out
                reply = json.loads(body)
                if not reply["ok"]:
                    raise RuntimeError(f"{self.address}: {reply['error']['message']}")
                return reply["data"]
        raise TimeoutError(f"{self.address} has not answered {command} within {self.timeout_ms} ms")


class CostRouter:
    """Chooses the decode rank to which the KV of a prompt is transferred soonest.

    Args:
        prefill: a rank of the prefill instance.
        decode: the decode ranks by name, each an instance of its own.
    """

    def __init__(self, prefill: Agent, decode: Mapping[str, Agent]) -> None:
        self._prefill = prefill
        self._decode = decode
        self._costs: dict[str, dict[str, Any]] = {}
        self._usable: list[str] = []
        self._ahead_ns = 0
        self._due = 0.0
        self._turn = 0

    def choose(self, tokens: int) -> str:
        """Returns the name of a decode rank for a prompt of `tokens` tokens.

        Raises:
            LookupError: no decode rank takes a prompt.
        """
        if time.monotonic() >= self._due:
            self.refresh()
            self._due = time.monotonic() + REFRESH_S
        if not self._usable:
            raise LookupError("no decode rank is connected and accepts rooms")
        self._turn += 1
        new = [name for name in self._usable if self._costs[name]["samples"] < FEWEST_ROOMS]
        if new:
            return new[self._turn % len(new)]
        times = {name: self.predicted_ns(name, tokens) for name in self._usable}
        known = [each for each in times.values() if each is not None]
        unknown_ns = median(known) if known else 0.0
        return min(times, key=lambda name: unknown_ns if (each := times[name]) is None else each)

    def refresh(self) -> None:
        """Asks the ranks for their costs, and which of them take prompts."""
        answer = self._prefill.ask("cost")
        self._costs = {cost["peer"]: cost for cost in answer["costs"]}
        self._ahead_ns = answer["ahead_ns"]
        accepting = [name for name, agent in self._decode.items() if agent.ask("cost")["accepting"]]
        self._usable = [name for name in accepting if self._costs.get(name, {}).get("state") == "ready"]

    def predicted_ns(self, name: str, tokens: int) -> float | None:
        """Returns the predicted transfer time of a prompt to a decode rank; None if it is not known."""
        cost = self._costs[name]
        if cost["fixed_ns"] is None:
            return None
        rate = cost["bytes_per_s"]
        own_ns = tokens * cost["bytes_per_token"] / rate * 1e9 if rate else 0.0
        return float(cost["fixed_ns"] + own_ns + self._ahead_ns)


def transfer(fleet: LiveFleet, prefill: str, decode: str, number: int, tokens: int) -> float:
    """Has one prompt transferred; returns the milliseconds until decode had it, when all its pages are free again."""
    began_ns = time.monotonic_ns()
    for rank in (decode, prefill):
        fleet.send(rank, Open(Room(number, number, tokens, 0)))
    ended_ms, holders = 0.0, {prefill, decode}
    deadline = time.monotonic() + TIMEOUT_S
    while holders:
        if time.monotonic() > deadline:
            raise SystemExit(f"prompt {number} was not transferred to {decode} within {TIMEOUT_S:g} s")
        for event in fleet.poll(0.1):
            if event.kind == "ended" and event.data["state"] != "Success":
                raise SystemExit(f"prompt {number} failed: {event.data['cause']}")
            if event.kind == "ended" and event.rank == decode:
                ended_ms = (event.data["at_ns"] - began_ns) / 1e6
            elif event.kind == "released":
                holders.discard(event.rank)
    return ended_ms


def main() -> None:
    parser = argparse.ArgumentParser(description="Chooses decode ranks by predicted transfer time")
    parser.add_argument("--prompts", type=int, default=60, help="prompts for each way to choose")
    parser.add_argument("--late-ms", type=int, default=50, help="how rarely the slow decode rank looks for arrivals")
    parser.add_argument("--transport", default="nixl")
    options = parser.parse_args()
    plan = FleetPlan(
        prefill=(Sizes(),),
        decode=Sizes(dp=2),
        transport=options.transport,
        tokens=TOKENS,
        concurrency=2,
        chunk_tokens=8192,
        config=CALM_TIMINGS,
        verify=False,
    )
    with LiveFleet(plan) as fleet:
        fleet.start()
        prefill, *_ = fleet.of_role("prefill")
        decode = fleet.of_role("decode")
        fleet.fault(decode[1], f"slow-reader={options.late_ms}ms")
        agents = {name: Agent(f"ipc://{socket_path(name)}") for name in (prefill, *decode)}
        router = CostRouter(agents[prefill], {name: agents[name] for name in decode})
        ways: dict[str, Callable[[int, int], str]] = {
            "round robin": lambda index, tokens: decode[index % len(decode)],
            "by cost": lambda index, tokens: router.choose(tokens),
        }
        number = 0
        for way, choose in ways.items():
            source, times, chosen = random.Random(7), [], []
            for index in range(options.prompts):
                number, tokens = number + 1, source.randint(*TOKENS)
                chosen.append(choose(index, tokens))
                times.append(transfer(fleet, prefill, chosen[-1], number, tokens))
            shares = ", ".join(f"{chosen.count(name)} to {name}" for name in decode)
            print(f"{way:<12} mean {mean(times):6.1f} ms   {shares}", flush=True)


if __name__ == "__main__":
    main()
