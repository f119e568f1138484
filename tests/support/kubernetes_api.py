"""A part of the Kubernetes API over HTTP: lists of pods, and port-forward over WebSocket as a node answers it.

It serves the API itself, and the port-forward path of a kubelet, so that it can stand behind a real API server as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import yaml
from aiohttp import WSMsgType, web

PROTOCOL = "v4.channel.k8s.io"
TOKEN = "a-token"


def pod(name: str, *ports: int, ip: str = "127.0.0.1", **status: Any) -> dict[str, Any]:
    """Returns a running pod, labelled app=kvctl, with these admin ports."""
    names = ["kvctl-admin", *(f"kvctl-admin-{number}" for number in range(1, len(ports)))][: len(ports)]
    container = {
        "name": "worker",
        "image": "kvctl",
        "ports": [{"name": each, "containerPort": port} for each, port in zip(names, ports, strict=True)],
    }
    return {
        "metadata": {"name": name, "namespace": "serving", "uid": f"uid-{name}", "labels": {"app": "kvctl"}},
        "spec": {"containers": [container]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "containerStatuses": [{"name": "worker", "state": {"running": {}}, "ready": True}],
            **status,
        },
    }


class KubernetesApi:
    """The server, on a thread of its own, until `close`.

    Args:
        tls: certificate and key of the server; without, it speaks plain HTTP.

    Attributes:
        pods: what it lists.
        page: pods per answer; with 0 the list never ends.
        denied: what it answers with 403: "list", "portforward".
        token: bearer token that it requires; "" for none.
        forwards: number of open port-forwards.
        delay_s: time until it answers a list.
    """

    def __init__(self, tls: tuple[Path, Path] | None = None, token: str = TOKEN) -> None:
        self.pods: list[dict[str, Any]] = []
        self.page = 500
        self.denied: set[str] = set()
        self.token = token
        self.forwards = 0
        self.delay_s = 0.0
        self.lists = 0
        self._sockets: set[web.WebSocketResponse] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kubernetes-api")
        self._thread.start()
        context = None
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
        self.port: int = self._run(self._start(context))
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"

    def kubeconfig(
        self, path: Path, context: str = "test", token: str = TOKEN, namespace: str = "default", **cluster: Any
    ) -> Path:
        """Writes a kubeconfig file with one context for this server."""
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": context,
                    "clusters": [{"name": "c", "cluster": {"server": self.url, **cluster}}],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [{"name": context, "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
                }
            )
        )
        return path

    def drop_forwards(self) -> None:
        """Ends all port-forwards, as an API server that is restarted does."""

        async def drop() -> None:
            for each in list(self._sockets):
                assert each._req is not None
                if (transport := each._req.transport) is not None:
                    transport.abort()

        self._run(drop())

    def close(self) -> None:
        async def stop() -> None:
            await self._runner.cleanup()
            pending = asyncio.all_tasks() - {asyncio.current_task()}
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

        self._run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, job: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(60)

    async def _start(self, context: ssl.SSLContext | None) -> int:
        app = web.Application()
        app.add_routes(
            [
                web.get("/api/v1/namespaces/{namespace}/pods", self._list),
                web.get("/api/v1/namespaces/{namespace}/pods/{pod}/portforward", self._forward),
                web.get("/portForward/{namespace}/{pod}", self._forward),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        assert site._server is not None
        return int(site._server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]

    def _refusal(self, request: web.Request, what: str) -> web.Response | None:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if what in self.denied:
            return _status(403, f'pods is forbidden: User "u" cannot {what} resource "pods" in API group ""')
        return None

    async def _list(self, request: web.Request) -> web.Response:
        self.lists += 1
        await asyncio.sleep(self.delay_s)
        if (refusal := self._refusal(request, "list")) is not None:
            return refusal
        wanted = dict(each.split("=") for each in request.query.get("labelSelector", "").split(",") if each)
        namespace = request.match_info["namespace"]
        found = [
            each
            for each in self.pods
            if each["metadata"]["namespace"] == namespace
            and wanted.items() <= each["metadata"].get("labels", {}).items()
        ]
        at = int(request.query.get("continue", 0))
        until = at + min(self.page, int(request.query.get("limit", self.page)))
        more = {"continue": str(until)} if until < len(found) else {}
        body = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1", **more}}
        return web.json_response({**body, "items": found[at:until]})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        kubelet = request.path.startswith("/portForward")
        if not kubelet and (refusal := self._refusal(request, "portforward")) is not None:
            return refusal
        known = {each["metadata"]["name"] for each in self.pods}
        if not kubelet and request.match_info["pod"] not in known:
            return _status(404, f'pods "{request.match_info["pod"]}" not found')
        port = int(request.query["port" if kubelet else "ports"])
        socket = web.WebSocketResponse(protocols=[PROTOCOL])
        await socket.prepare(request)
        for channel in (0, 1):
            await socket.send_bytes(bytes((channel,)) + port.to_bytes(2, "little"))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            await socket.send_bytes(f"\1error forwarding port {port}: {error.strerror}: connection refused".encode())
            await socket.close()
            return socket
        self.forwards += 1
        self._sockets.add(socket)

        async def from_pod() -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    await socket.send_bytes(b"\0" + data)
            await socket.close()

        pump = asyncio.create_task(from_pod())
        try:
            async for message in socket:
                if message.type == WSMsgType.BINARY and message.data[0] == 0:
                    writer.write(message.data[1:])
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._sockets.discard(socket)
            self.forwards -= 1
            writer.close()
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await pump
        return socket


def _status(code: int, message: str) -> web.Response:
    return web.json_response(
        {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}, status=code
    )
