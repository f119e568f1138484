"""Layer groups that are sent while SGLang computes later layers: the tokens are those of the undivided server."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from functools import partial

import pytest

from kvctl.lab.bench.sglang_servers import Process, ServerError, Tokens, together
from tests.sglang_servers.conftest import CHUNK_TOKENS, GPUS, Servers, Undivided
from tests.sglang_servers.test_kvctl import rows
from tests.sglang_servers.test_tokens import prompt
from tests.support.sglang_fleet import Prefill, request

# Several chunks, pages that are not full, and the ends of both.
LENGTHS = (1, 16, 17, 64, 65, 100, 333)
FLEETS = ["layers-tp1", "layers2-overlap"]
pytestmark = pytest.mark.modes("kvctl", reason="SGLang's own backends send a chunk when all of its layers are computed")
fleets = pytest.mark.parametrize("servers", FLEETS, indirect=True, scope="session")


@pytest.fixture
def pair(servers: Servers) -> tuple[Prefill, Process]:
    return next(iter(servers.prefills.values())), next(iter(servers.decodes.values()))


@pytest.fixture
def alone(servers: Servers) -> Undivided:
    assert servers.alone is not None
    return servers.alone


def check(pair: tuple[Prefill, Process], alone: Undivided, prompts: Sequence[Tokens], threads: int = 8) -> None:
    prefill, decode = pair
    answers = together([partial(prefill.generate, decode, each) for each in prompts], threads)
    for each, (first, all_) in zip(prompts, answers, strict=True):
        assert all_.tokens == alone.tokens(each), len(each)
        assert first.tokens == all_.tokens[:1]


def groups_sent(servers: Servers, room: int) -> set[tuple[int, ...]]:
    """Returns the layer groups of the parts of a room, from its timeline."""
    (shown,) = rows(servers, "rooms", "show", str(room))
    return {tuple(event["layers"]) for event in shown["timeline"] if event["layers"] is not None}


@fleets
def test_tokens(pair: tuple[Prefill, Process], alone: Undivided) -> None:
    check(pair, alone, [prompt(length, seed) for length in LENGTHS for seed in (71, 72)])


@fleets
def test_parts_are_of_layer_groups(servers: Servers, pair: tuple[Prefill, Process]) -> None:
    prefill, decode = pair
    message = prefill.request(prompt(333, seed=73), 4)
    prefill.send(decode, message)
    assert groups_sent(servers, message["bootstrap_room"]) == {(0, 3), (3, 6), (6, 8)}


@fleets
def test_prefixes_in_both_caches(pair: tuple[Prefill, Process], alone: Undivided) -> None:
    shared = prompt(200, seed=74)
    for suffix in (prompt(20, seed=75), prompt(90, seed=76), prompt(90, seed=76), prompt(3 * CHUNK_TOKENS, seed=77)):
        check(pair, alone, [shared + suffix])


@fleets
def test_identical_prompts_at_once(pair: tuple[Prefill, Process], alone: Undivided) -> None:
    """SGLang frees the pages of all but one of them while they are sent, and gives them to other requests."""
    for seed in range(80, 86):
        same, others = prompt(300, seed=seed), [prompt(260, seed=each) for each in range(10 * seed, 10 * seed + 4)]
        check(pair, alone, [same, same, others[0], same, others[1], same, others[2], others[3]], threads=8)


@fleets
def test_aborts_while_layers_are_sent(servers: Servers, pair: tuple[Prefill, Process], alone: Undivided) -> None:
    """A request that is aborted fails on both servers, and nothing is left of it.

    SGLang ends a server that has lost a page when it is idle.
    """
    prefill, decode = pair
    for number in range(8):
        message = prefill.request(prompt(5 * CHUNK_TOKENS + 7, seed=90 + number), 16) | {"rid": f"aborted-{number}"}

        def send(message: dict[str, object] = message) -> None:
            with contextlib.suppress(ServerError):  # how SGLang tells an abort
                prefill.send(decode, message)

        client = threading.Thread(target=send)
        client.start()
        time.sleep(0.04 * number)
        for server in (prefill.process, decode):
            request(f"{server.url}/abort_request", json.dumps({"rid": f"aborted-{number}"}).encode())
        client.join()
    # With seed 99 the undivided server itself generates other tokens on a GPU when it computes several prompts at once.
    check(pair, alone, [prompt(length, seed=103) for length in LENGTHS])
    assert rows(servers, "rooms") == []


@pytest.mark.skipif(bool(GPUS), reason="SGLang's wheel of kernels is missing on these hosts")
@pytest.mark.parametrize("servers", ["layers-hicache"], indirect=True, scope="session")
def test_prefixes_that_hicache_loads_from_the_host(
    servers: Servers, pair: tuple[Prefill, Process], alone: Undivided
) -> None:
    """The pages of a prefix are loaded for the forward that sends them, others are evicted meanwhile."""
    prefill, decode = pair
    shared = [prompt(400, seed=seed) for seed in range(110, 116)]
    check(pair, alone, shared, threads=2)
    for seed, prefix in enumerate(shared, 120):
        message = prefill.request(prefix + prompt(90, seed=seed), 16)
        first, answer = prefill.send(decode, message)
        assert answer.tokens == alone.tokens(prefix + prompt(90, seed=seed))
        assert first.cached >= 400
        assert groups_sent(servers, message["bootstrap_room"]) == {(0, 3), (3, 6), (6, 8)}
    repeated = [prefix + prompt(60, seed=seed % 2) for seed, prefix in enumerate(shared * 2)]
    check(pair, alone, [each for tokens in repeated for each in (tokens, tokens)], threads=6)
