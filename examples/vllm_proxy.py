"""A proxy in front of vLLM prefill and decode servers that transfer KV through kvctl.

It serves /v1/completions and /v1/chat/completions, and sends each request to a prefill and a decode server at the same
time, both chosen round robin: decode has its pages ready while prefill computes, and layers move as soon as they are
computed. The client gets decode's answer, streamed if it asks for that.

Each prefill server is given as its URL and the endpoint of its registry, tcp://ADDRESS:{kv_port}; one with
--data-parallel-size N as its URL and N endpoints, with the ports kv_port, kv_port + 1, …:

    python examples/vllm_proxy.py --prefill http://127.0.0.1:8100 tcp://127.0.0.1:14579 --decode http://127.0.0.1:8200
    python examples/vllm_proxy.py --prefill http://a:8100 tcp://a:14579 --prefill http://b:8100 tcp://b:14579 \
        --decode http://c:8200 --decode http://d:8200 --host 0.0.0.0 --port 8000

If prefill fails before decode has answered, decode gets the request once more, without a transfer, and computes the
prompt itself. It does so at once with requests for several sequences (`n`, several prompts, beam search), since a
transfer fills the pages of one. A client that disconnects ends its request on both servers. With --sequential, decode
gets a request when prefill has computed it, with the parameters that prefill returned.

A prefill server may be SGLang with kvctl's backend, given as its URL and --disaggregation-bootstrap-port:

    python examples/vllm_proxy.py --sglang-prefill http://127.0.0.1:30000 8998 --decode http://127.0.0.1:8200

SGLang gets the token ids of a prompt. If it is text, the decode server tells them, for which it needs
--enable-scale-out. A prompt with images or audio goes to decode alone.

It needs aiohttp, which vLLM installs too. It is an example: a server that fails is not left out of the round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

LARGEST_REQUEST = 64 << 20  # bytes
CONNECT_S = 5.0  # longest time to connect to a server; answers may take any time
SGLANG_RANK = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
FORWARDED_HEADERS = ("Authorization", "X-Request-Id", "traceparent", "tracestate")

logger = logging.getLogger("vllm_proxy")

Body = dict[str, Any]


class Prefill(NamedTuple):
    """A prefill server, or one of its data-parallel ranks.

    Attributes:
        url: base URL of the server.
        registry: endpoint of the registry of this rank.
        rank: data-parallel rank; "" if the server has only one.
    """

    url: str
    registry: str
    rank: str = ""


class SGLangPrefill(NamedTuple):
    """A prefill server of SGLang.

    Attributes:
        url: base URL of the server.
        bootstrap_host, bootstrap_port: its bootstrap server, which knows the registry of each rank.
    """

    url: str
    bootstrap_host: str
    bootstrap_port: int


class Proxy:
    """Dispatches each request to a prefill and a decode server."""

    def __init__(
        self, prefills: Sequence[Prefill | SGLangPrefill], decodes: Sequence[str], *, sequential: bool = False
    ) -> None:
        self._prefills = itertools.cycle(prefills)
        self._decodes = itertools.cycle(decodes)
        self._sequential = sequential
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.cleanup_ctx.append(self._connections)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._session:
            yield

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._relay(request, web.StreamResponse(), next(self._decodes), None, {})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            return _error(400, f"the request is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the request is not a JSON object")
        body.pop("kv_transfer_params", None)  # they name addresses to connect to: not the client's choice
        server, url = next(self._prefills), next(self._decodes)
        headers = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
        transfer = uuid.uuid4().hex
        headers.setdefault("X-Request-Id", transfer)
        response = web.StreamResponse()
        if not _is_single(body):
            return await self._relay(request, response, url, body, headers)
        # vLLM passes these to the connector, headers it does not: the trace context makes rooms spans of the request.
        shared: Body = {name: headers[name] for name in ("traceparent",) if name in headers}
        shared["transfer_id"] = secrets.randbits(63) if isinstance(server, SGLangPrefill) else transfer
        tasks: list[asyncio.Task[Any]] = []

        def start(coroutine: Any) -> asyncio.Task[Any]:
            tasks.append(asyncio.create_task(coroutine))
            return tasks[-1]

        try:
            if isinstance(server, SGLangPrefill):
                room = shared["transfer_id"]
                registry, tokens = await asyncio.gather(
                    self._registry(server, room), self._tokens(url, request.path, body, headers)
                )
                if not (registry and tokens):
                    return await self._relay(request, response, url, body, headers)
                prefill = start(self._sglang_prefill(server, tokens, room, body, headers))
            else:
                registry = server.registry
                prefill = start(self._prefill(server, request.path, body, headers, shared))
            params: Body | None = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "kvctl_prefill": registry,
                **shared,
            }
            if self._sequential:
                params = await prefill
            decode = start(self._relay(request, response, url, body | {"kv_transfer_params": params}, headers))
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and prefill.result() is None and not self._sequential and not response.prepared:
                decode.cancel()
                await asyncio.wait({decode})
                decode = start(self._relay(request, response, url, body, headers))
            return await decode  # type: ignore[no-any-return]
        finally:
            for task in tasks:
                task.cancel()

    async def _prefill(
        self, server: Prefill, path: str, body: Body, headers: Mapping[str, str], shared: Body
    ) -> Body | None:
        """Has a prompt computed. Returns the parameters for decode; None if it failed, which is logged."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, **shared}
        body = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
        body |= {"stream": False, "max_tokens": 1, "kv_transfer_params": params}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        if server.rank:
            headers = {**headers, "X-data-parallel-rank": server.rank}
        answer = await self._post("prefill server", server.url, path, body, headers)
        if answer is None or (found := answer.get("kv_transfer_params")):
            return answer and found  # type: ignore[no-any-return]
        reason = "its answer has no kv_transfer_params: does it run with --kv-transfer-config?"
        _warn("prefill server", server.url, headers, reason)
        return None

    async def _registry(self, server: SGLangPrefill, room: int) -> str:
        """Returns the endpoint of the registry of the SGLang rank that computes a room; "" if it is unknown.

        It is looked up for each request, since a restarted server has another one. SGLang gives a room to the
        data-parallel rank `room % size`.
        """
        url = f"http://{server.bootstrap_host}:{server.bootstrap_port}/route"
        try:
            async with self._session.get(url, params=dict.fromkeys(SGLANG_RANK, "-1")) as answer:
                size = (await answer.json())["dp_size"]
            first = dict.fromkeys(SGLANG_RANK, "0") | {"prefill_dp_rank": str(room % size)}
            async with self._session.get(url, params=first) as answer:
                row = await answer.json()
            host = f"[{row['rank_ip']}]" if ":" in row["rank_ip"] else row["rank_ip"]
            return f"tcp://{host}:{row['rank_port']}"
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            logger.warning("SGLang's bootstrap server failed: %s: %s", url, error or type(error).__name__)
            return ""

    async def _tokens(self, url: str, path: str, body: Body, headers: Mapping[str, str]) -> list[int]:
        """Returns the token ids of a prompt, from decode unless it consists of them; [] if it has more than tokens."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) and "truncate_prompt_tokens" not in body:
            return prompt
        rendered = await self._post("decode server", url, f"{path}/render", body, headers)
        first = rendered[0] if isinstance(rendered, list) else rendered or {}
        return [] if first.get("features") else first.get("token_ids", [])

    async def _sglang_prefill(
        self, server: SGLangPrefill, tokens: Sequence[int], room: int, request: Body, headers: Mapping[str, str]
    ) -> Body | None:
        """Has a prompt computed by SGLang. Returns its answer; None if it failed, which is logged."""
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "bootstrap_host": server.bootstrap_host,
            "bootstrap_port": server.bootstrap_port,
            "bootstrap_room": room,
            "cache_salt": request.get("cache_salt"),  # both engines compare it
        }
        return await self._post("prefill server", server.url, "/generate", body, headers)  # type: ignore[no-any-return]

    async def _post(self, role: str, url: str, path: str, body: Body, headers: Mapping[str, str]) -> Any:
        """Returns the JSON that a server answers; None if it fails, which is logged."""
        try:
            async with self._session.post(url + path, json=body, headers=headers) as answer:
                text = await answer.text()
                if answer.status == 200:
                    return json.loads(text)
                reason = f"it answered {answer.status}: {text[:200]}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
        _warn(role, url, headers, reason)
        return None

    async def _relay(
        self,
        request: web.Request,
        response: web.StreamResponse,
        url: str,
        body: Body | None,
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        """Passes a request on to a decode server, and its answer to the client from its first bytes on."""
        try:
            async with self._session.request(request.method, url + request.path, json=body, headers=headers) as answer:
                chunk = await answer.content.readany()
                response.set_status(answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                while chunk:
                    await response.write(chunk)
                    chunk = await answer.content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = f"request to decode server {url} failed: {error or type(error).__name__}"
            if response.prepared:
                raise  # aiohttp logs it and closes the connection: the client does not take the answer for complete
            logger.warning("%s", reason)
            return _error(502, reason)
        await response.write_eof()
        return response


def _is_single(body: Body) -> bool:
    """Whether vLLM makes one sequence of a request; a prompt is a text or a list of token ids."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not several and not body.get("use_beam_search") and body.get("n") in (None, 1)


def _warn(role: str, url: str, headers: Mapping[str, str], reason: str) -> None:
    logger.warning("%s %s failed with request %s: %s", role, url, headers["X-Request-Id"], reason)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "proxy_error", "code": status}}, status=status)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PD proxy for vLLM servers with kvctl's connector")
    parser.add_argument("--prefill", nargs="+", action="append", default=[], metavar=("URL", "REGISTRY"))
    parser.add_argument("--sglang-prefill", nargs=2, action="append", default=[], metavar=("URL", "BOOTSTRAP_PORT"))
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sequential", action="store_true", help="send requests to decode when prefill has answered")
    options = parser.parse_args(argv)
    prefills: list[Prefill | SGLangPrefill] = []
    for url, *registries in options.prefill:
        if not registries:
            parser.error(f"--prefill {url}: add the endpoint of its registry, such as tcp://127.0.0.1:14579")
        ranks = [str(rank) for rank in range(len(registries))] if len(registries) > 1 else [""]
        prefills += [Prefill(url.rstrip("/"), *each) for each in zip(registries, ranks, strict=True)]
    for url, port in options.sglang_prefill:
        if not port.isdigit():
            parser.error(f"--sglang-prefill {url} {port}: add its --disaggregation-bootstrap-port, such as 8998")
        prefills.append(SGLangPrefill(url.rstrip("/"), urlsplit(url).hostname or url, int(port)))
    if not prefills:
        parser.error("name a prefill server with --prefill or --sglang-prefill")
    if options.sequential and options.sglang_prefill:
        parser.error("--sequential: SGLang computes a prompt only when decode has pages for it")
    options.prefill = prefills
    options.decode = [url.rstrip("/") for url in options.decode]
    return options


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    options = arguments()
    proxy = Proxy(options.prefill, options.decode, sequential=options.sequential)
    web.run_app(proxy.app(), host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
