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

It needs aiohttp, which vLLM installs too. It is an example: a server that fails is not left out of the round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

LARGEST_REQUEST = 64 << 20  # bytes
CONNECT_S = 5.0  # longest time to connect to a server; answers may take any time
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


class Proxy:
    """Dispatches each request to a prefill and a decode server."""

    def __init__(self, prefills: Sequence[Prefill], decodes: Sequence[str], *, sequential: bool = False) -> None:
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
        shared["transfer_id"] = transfer
        tasks: list[asyncio.Task[Any]] = []

        def start(coroutine: Any) -> asyncio.Task[Any]:
            tasks.append(asyncio.create_task(coroutine))
            return tasks[-1]

        try:
            prefill = start(self._prefill(server, request.path, body, headers, shared))
            params: Body | None = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "kvctl_prefill": server.registry,
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
        try:
            async with self._session.post(server.url + path, json=body, headers=headers) as response:
                text = await response.text()
                if response.status != 200:
                    reason = f"it answered {response.status}: {text[:200]}"
                elif found := json.loads(text).get("kv_transfer_params"):
                    return found  # type: ignore[no-any-return]
                else:
                    reason = "its answer has no kv_transfer_params: does it run with --kv-transfer-config?"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
        request_id = headers["X-Request-Id"]
        logger.warning("prefill server %s failed with request %s: %s", server.url, request_id, reason)
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


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "proxy_error", "code": status}}, status=status)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PD proxy for vLLM servers with kvctl's connector")
    parser.add_argument("--prefill", nargs="+", action="append", required=True, metavar=("URL", "REGISTRY"))
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sequential", action="store_true", help="send requests to decode when prefill has answered")
    options = parser.parse_args(argv)
    prefills: list[Prefill] = []
    for url, *registries in options.prefill:
        if not registries:
            parser.error(f"--prefill {url}: add the endpoint of its registry, such as tcp://127.0.0.1:14579")
        ranks = [str(rank) for rank in range(len(registries))] if len(registries) > 1 else [""]
        prefills += [Prefill(url.rstrip("/"), *each) for each in zip(registries, ranks, strict=True)]
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
