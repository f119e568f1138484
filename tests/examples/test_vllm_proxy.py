"""examples/vllm_proxy.py in front of servers that record what they get, and answer when a test lets them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from examples.vllm_proxy import Prefill, Proxy, SGLangPrefill, arguments

TIMEOUT_S = 60.0
REGISTRY = "tcp://127.0.0.1:14579"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DECODED = {"choices": [{"text": "decoded"}]}
RETURNED = {"do_remote_prefill": True, "transfer_id": "of prefill", "kvctl_prefill": "tcp://10.0.0.1:14579"}

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a coroutine as a test."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(TIMEOUT_S):
                await test(**fixtures)

        asyncio.run(limited())

    return run


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """Serves an application on a free port. Yields its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


class Server:
    """A vLLM server, with the requests that it got.

    Attributes:
        asked: the first request has come.
        left: the proxy has closed the connection of a request that was not answered.
    """

    def __init__(self, answer: Answer) -> None:
        self.paths: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.asked, self.left = asyncio.Event(), asyncio.Event()
        self._answer = answer

    @property
    def params(self) -> list[dict[str, Any] | None]:
        return [body.get("kv_transfer_params") for body in self.bodies]

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        self.headers.append(request.headers)
        self.bodies.append(json.loads(await request.read() or b"{}"))
        self.asked.set()
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self.left.set()
            raise


async def prefilled(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"kv_transfer_params": RETURNED})


async def decoded(_request: web.Request) -> web.StreamResponse:
    return web.json_response(DECODED)


async def never(_request: web.Request) -> web.StreamResponse:
    return await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def proxied(
    prefill: Sequence[Prefill | SGLangPrefill], decode: Sequence[str], *, sequential: bool = False
) -> AsyncIterator[aiohttp.ClientSession]:
    """Runs a proxy. Yields its client."""
    async with (
        serving(Proxy(prefill, decode, sequential=sequential).app()) as url,
        aiohttp.ClientSession(url) as client,
    ):
        yield client


@asynccontextmanager
async def pair(prefill: Server, decode: Server, *, sequential: bool = False) -> AsyncIterator[aiohttp.ClientSession]:
    """Runs a prefill and a decode server behind a proxy. Yields its client."""
    async with (
        serving(prefill.app()) as prefill_url,
        serving(decode.app()) as decode_url,
        proxied([Prefill(prefill_url, REGISTRY)], [decode_url], sequential=sequential) as client,
    ):
        yield client


async def ask(client: aiohttp.ClientSession, path: str = COMPLETIONS, **body: Any) -> tuple[int, Any]:
    async with client.post(path, json=body) as answer:
        return answer.status, await answer.json()


@scenario
async def test_both_servers_have_a_request_before_either_answers() -> None:
    async def after_decode(request: web.Request) -> web.StreamResponse:
        await decode.asked.wait()
        return await prefilled(request)

    async def after_prefill(request: web.Request) -> web.StreamResponse:
        await prefill.asked.wait()
        return await decoded(request)

    prefill, decode = Server(after_decode), Server(after_prefill)
    async with pair(prefill, decode) as client:
        assert await ask(client, model="m", prompt="p", max_tokens=7, min_tokens=5) == (200, DECODED)
    (to_prefill,), (to_decode,) = prefill.bodies, decode.bodies
    transfer = to_prefill["kv_transfer_params"]["transfer_id"]
    assert to_prefill == {
        "model": "m",
        "prompt": "p",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer},
    }
    assert to_decode == {
        "model": "m",
        "prompt": "p",
        "max_tokens": 7,
        "min_tokens": 5,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kvctl_prefill": REGISTRY,
            "transfer_id": transfer,
        },
    }
    assert prefill.headers[0]["X-Request-Id"] == decode.headers[0]["X-Request-Id"] == transfer


@scenario
async def test_each_request_has_a_transfer_of_its_own() -> None:
    prefill, decode = Server(prefilled), Server(decoded)
    async with pair(prefill, decode) as client:
        for _ in range(2):
            await ask(client, prompt="p")
    one, other = (params["transfer_id"] for params in decode.params)
    assert one != other


@scenario
async def test_a_chat_is_streamed_chunk_by_chunk() -> None:
    first_read = asyncio.Event()

    async def chunks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await first_read.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    prefill, decode = Server(prefilled), Server(chunks)
    body = {"messages": [], "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 9}
    async with pair(prefill, decode) as client, client.post(CHAT, json=body) as answer:
        assert answer.content_type == "text/event-stream"
        assert await answer.content.readany() == b"data: 1\n\n"
        first_read.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"
    assert prefill.paths == decode.paths == [CHAT]
    assert decode.bodies[0].items() >= body.items()
    assert prefill.bodies[0].keys() == {
        "messages",
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "kv_transfer_params",
    }
    assert (prefill.bodies[0]["stream"], prefill.bodies[0]["max_completion_tokens"]) == (False, 1)


@scenario
async def test_sequential_passes_on_the_parameters_that_prefill_returned() -> None:
    async def before_decode(request: web.Request) -> web.StreamResponse:
        assert not decode.asked.is_set()
        return await prefilled(request)

    prefill, decode = Server(before_decode), Server(decoded)
    async with pair(prefill, decode, sequential=True) as client:
        assert await ask(client, prompt="p") == (200, DECODED)
    assert decode.params == [RETURNED]


async def failing(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="out of blocks")


async def without_connector(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"kv_transfer_params": None})


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [(failing, "it answered 500: out of blocks"), (without_connector, "its answer has no kv_transfer_params")],
)
@scenario
async def test_decode_computes_the_prompt_that_prefill_failed_with(
    sequential: bool, answer: Answer, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def without_transfer(request: web.Request) -> web.StreamResponse:
        return await (never if decode.params[-1] else decoded)(request)

    prefill, decode = Server(answer), Server(without_transfer)
    async with pair(prefill, decode, sequential=sequential) as client:
        assert await ask(client, prompt="p") == (200, DECODED)
        if len(decode.params) == 2:  # the one that waited for prefill was cancelled
            await decode.left.wait()
    assert decode.params[-1] is None
    assert decode.headers[-1]["X-Request-Id"] in caplog.text
    assert reason in caplog.text


@scenario
async def test_a_prefill_server_that_cannot_be_reached_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def without_transfer(request: web.Request) -> web.StreamResponse:
        return await (never if decode.params[-1] else decoded)(request)

    decode, gone = Server(without_transfer), f"http://127.0.0.1:{unused_port()}"
    async with serving(decode.app()) as url, proxied([Prefill(gone, REGISTRY)], [url]) as client:
        assert await ask(client, prompt="p") == (200, DECODED)
    assert decode.params[-1] is None
    assert f"prefill server {gone} failed with request " in caplog.text


@scenario
async def test_an_answer_that_has_begun_is_not_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    begun = asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        await begun.wait()
        return await failing(request)

    async def chunks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"1")
        await reported.wait()
        await response.write(b"2")
        return response

    reported = asyncio.Event()
    handler = logging.Handler()
    handler.emit = lambda record: reported.set()  # type: ignore[method-assign]
    logging.getLogger("vllm_proxy").addHandler(handler)
    decode = Server(chunks)
    try:
        async with pair(Server(late), decode) as client, client.post(COMPLETIONS, json={"prompt": "p"}) as answer:
            assert await answer.content.readany() == b"1"
            begun.set()
            assert await answer.content.read() == b"2"
    finally:
        logging.getLogger("vllm_proxy").removeHandler(handler)
    assert len(decode.bodies) == 1


@scenario
async def test_a_client_that_disconnects_ends_its_request_on_both_servers() -> None:
    prefill, decode = Server(never), Server(never)
    async with pair(prefill, decode) as client:
        asking = asyncio.create_task(ask(client, prompt="p"))
        await prefill.asked.wait()
        await decode.asked.wait()
        asking.cancel()
        await prefill.left.wait()
        await decode.left.wait()


@scenario
async def test_the_error_of_a_decode_server_is_the_clients() -> None:
    async def refused(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async with pair(Server(prefilled), Server(refused)) as client:
        assert await ask(client, prompt="p") == (400, {"error": {"message": "too long"}})


@scenario
async def test_a_decode_server_that_cannot_be_reached_ends_the_prefill() -> None:
    prefill, gone = Server(never), f"http://127.0.0.1:{unused_port()}"
    async with serving(prefill.app()) as url, proxied([Prefill(url, REGISTRY)], [gone]) as client:
        status, body = await ask(client, prompt="p")
    assert status == 502
    assert body["error"]["message"].startswith(f"request to decode server {gone} failed: ")


@scenario
async def test_an_answer_that_breaks_off_is_not_taken_for_complete() -> None:
    async def breaks_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        request.transport.abort()
        return response

    async with (
        pair(Server(prefilled), Server(breaks_off)) as client,
        client.post(COMPLETIONS, json={"prompt": "p"}) as answer,
    ):
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "p", "n": 2},
        {"prompt": ["p", "q"]},
        {"prompt": [[1], [2]]},
        {"prompt": "p", "use_beam_search": True},
    ],
)
@scenario
async def test_requests_for_several_sequences_go_to_decode_alone(body: dict[str, Any]) -> None:
    prefill, decode = Server(prefilled), Server(decoded)
    async with pair(prefill, decode) as client:
        assert await ask(client, **body, kv_transfer_params={"kvctl_prefill": "tcp://of.a.client:1"}) == (200, DECODED)
    assert (prefill.bodies, decode.bodies) == ([], [body])


@pytest.mark.parametrize("prompt", ["p", ["p"], [1, 2], [[1, 2]]])
@scenario
async def test_a_prompt_is_a_text_or_a_list_of_tokens(prompt: Any) -> None:
    prefill, decode = Server(prefilled), Server(decoded)
    async with pair(prefill, decode) as client:
        await ask(client, prompt=prompt, n=1)
    assert len(prefill.bodies) == 1


@scenario
async def test_servers_and_data_parallel_ranks_take_turns() -> None:
    one, two, decode_one, decode_two = Server(prefilled), Server(prefilled), Server(decoded), Server(decoded)
    async with (
        serving(one.app()) as first,
        serving(two.app()) as second,
        serving(decode_one.app()) as third,
        serving(decode_two.app()) as fourth,
    ):
        text = f"--prefill {first} tcp://a:1 tcp://a:2 --prefill {second}/ tcp://b:1 --decode {third} --decode {fourth}"
        options = arguments(text.split())
        async with proxied(options.prefill, options.decode) as client:
            for _ in range(4):
                await ask(client, prompt="p")
    assert [headers.get("X-data-parallel-rank") for headers in one.headers] == ["0", "1", "0"]
    assert [headers.get("X-data-parallel-rank") for headers in two.headers] == [None]
    assert [params["kvctl_prefill"] for params in decode_one.params] == ["tcp://a:1", "tcp://b:1"]
    assert [params["kvctl_prefill"] for params in decode_two.params] == ["tcp://a:2", "tcp://a:1"]


@scenario
async def test_names_and_traces_of_requests_reach_both_servers() -> None:
    names = {"X-Request-Id": "r7", "traceparent": "00-1-2-01", "Authorization": "Bearer k"}
    prefill, decode = Server(prefilled), Server(decoded)
    async with pair(prefill, decode) as client, client.post(COMPLETIONS, json={"prompt": "p"}, headers=names):
        pass
    for server in (prefill, decode):
        assert {name: server.headers[0].get(name) for name in names} == names
        assert server.params[0]["traceparent"] == "00-1-2-01"
        assert server.params[0]["transfer_id"] != "r7"  # clients may repeat theirs


@scenario
async def test_the_models_are_those_of_decode() -> None:
    decode = Server(decoded)
    async with pair(Server(prefilled), decode) as client, client.get("/v1/models") as answer:
        assert await answer.json() == DECODED
    assert decode.paths == ["/v1/models"]


@pytest.mark.parametrize("data", [b"{", b"[]"])
@scenario
async def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    prefill, decode = Server(prefilled), Server(decoded)
    async with pair(prefill, decode) as client, client.post(COMPLETIONS, data=data) as answer:
        assert answer.status == 400
        assert "JSON" in (await answer.json())["error"]["message"]
    assert prefill.bodies == decode.bodies == []


def test_a_prefill_server_needs_the_endpoint_of_its_registry(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--prefill", "http://a:8100", "--decode", "http://b:8200"])
    assert "add the endpoint of its registry, such as tcp://127.0.0.1:14579" in capsys.readouterr().err


@asynccontextmanager
async def behind_sglang(sglang: Server, decode: Server, *, ready: bool = True) -> AsyncIterator[aiohttp.ClientSession]:
    """Runs SGLang with two data-parallel ranks, its bootstrap server and a decode server behind a proxy."""

    async def route(request: web.Request) -> web.StreamResponse:
        if not ready:
            return web.Response(text="Prefill server not fully registered yet", status=503)
        rank = int(request.query["prefill_dp_rank"])
        return web.json_response({"dp_size": 2} if rank < 0 else {"rank_ip": "127.0.0.1", "rank_port": 5000 + rank})

    async with (
        serving(Server(route).app()) as bootstrap_url,
        serving(sglang.app()) as sglang_url,
        serving(decode.app()) as decode_url,
        proxied(
            [SGLangPrefill(sglang_url, "127.0.0.1", int(bootstrap_url.rpartition(":")[2]))], [decode_url]
        ) as client,
    ):
        yield client


def rendering(**rendered: Any) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response([rendered]) if request.path.endswith("/render") else await decoded(request)

    return answer


@scenario
async def test_sglang_and_decode_have_the_same_tokens_and_room() -> None:
    sglang, decode = Server(decoded), Server(decoded)
    async with behind_sglang(sglang, decode) as client:
        for _ in range(4):
            assert await ask(client, model="m", prompt=[5, 6, 7], max_tokens=9) == (200, DECODED)
    assert decode.paths == [COMPLETIONS] * 4
    for to_sglang, to_decode in zip(sglang.bodies, decode.bodies, strict=True):
        room = to_sglang["bootstrap_room"]
        assert to_sglang["input_ids"] == [5, 6, 7]
        assert to_sglang["cache_salt"] == to_decode.get("cache_salt")
        assert 0 <= room < 1 << 63
        params = to_decode.pop("kv_transfer_params")
        assert to_decode == {"model": "m", "prompt": [5, 6, 7], "max_tokens": 9}
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": room,
            "kvctl_prefill": f"tcp://127.0.0.1:{5000 + room % 2}",
        }


@pytest.mark.parametrize("body", [{"prompt": "p"}, {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}])
@scenario
async def test_decode_tells_the_tokens_that_sglang_computes(body: dict[str, Any]) -> None:
    sglang, decode = Server(decoded), Server(rendering(token_ids=[8, 9], features=None))
    async with behind_sglang(sglang, decode) as client:
        assert await ask(client, **body) == (200, DECODED)
    assert decode.bodies[0] == body
    assert [each["input_ids"] for each in sglang.bodies] == [[8, 9]]


@scenario
async def test_a_prompt_with_images_goes_to_decode_alone() -> None:
    sglang, decode = Server(decoded), Server(rendering(token_ids=[8], features={"mm_hashes": {}}))
    async with behind_sglang(sglang, decode) as client:
        assert await ask(client, CHAT, messages=[]) == (200, DECODED)
    assert sglang.bodies == []
    assert decode.params == [None, None]


@scenario
async def test_a_bootstrap_server_that_is_not_ready_leaves_the_prompt_to_decode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sglang, decode = Server(decoded), Server(decoded)
    async with behind_sglang(sglang, decode, ready=False) as client:
        assert await ask(client, prompt=[1]) == (200, DECODED)
    assert (sglang.bodies, decode.params) == ([], [None])
    assert "SGLang's bootstrap server failed" in caplog.text


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--sglang-prefill", "http://a:30000", "tcp://a:1"], "add its --disaggregation-bootstrap-port, such as 8998"),
        (["--sglang-prefill", "http://a:30000", "8998", "--sequential"], "only when decode has pages for it"),
        ([], "name a prefill server"),
    ],
)
def test_what_sglang_needs(more: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--decode", "http://b:8200", *more])
    assert reason in capsys.readouterr().err


def test_the_bootstrap_server_of_sglang_is_on_its_host() -> None:
    found = arguments(["--decode", "http://b:8200", "--sglang-prefill", "http://a:30000/", "8998"])
    assert found.prefill == [SGLangPrefill("http://a:30000", "a", 8998)]
