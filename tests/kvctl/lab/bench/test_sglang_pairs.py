"""Sides and layouts of SGLang servers, and requests to a pair that answers as SGLang does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.bench.sglang_pairs import Pair, ServerPlan, parse_sides, role_flags
from kvctl.lab.bench.sglang_servers import HOST, ServerError
from kvctl.lab.ranks.request import Sizes

DEADLINE_S = 60


class TestSides:
    def test_a_side_is_a_backend_and_its_environment(self) -> None:
        nixl, kvctl = parse_sides("nixl,kvctl-pipelined")
        assert (nixl.backend, nixl.environment["KVCTL_SGLANG"]) == ("nixl", "off")
        assert (kvctl.backend, kvctl.environment["KVCTL_PIPELINE"]) == ("kvctl", "on")

    def test_settings_follow_slashes_and_may_have_commas_and_slashes(self) -> None:
        first, second = parse_sides("kvctl/KVCTL_PATH=staged/UCX_TLS=tcp,cuda_copy/HOME=/tmp/x,nixl")
        assert first.environment["UCX_TLS"] == "tcp,cuda_copy"
        assert (first.environment["KVCTL_PATH"], first.environment["HOME"]) == ("staged", "/tmp/x")
        assert first.text.endswith("/HOME=/tmp/x")
        assert second.text == "nixl"

    def test_a_setting_replaces_that_of_the_side(self) -> None:
        (side,) = parse_sides("kvctl-pipelined/KVCTL_PIPELINE=auto")
        assert side.environment["KVCTL_PIPELINE"] == "auto"

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("nixl,kvcl", "'kvcl' is not a side; allowed: nixl, staging"),
            ("nixl,nixl", "a side is given twice"),
            ("kvctl/", "write kvctl/KEY=VALUE"),
            ("kvctl/staged", "is not a side"),
            ("", "is not a side"),
        ],
    )
    def test_an_unknown_side_is_refused(self, text: str, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            parse_sides(text)


class TestFlags:
    @pytest.mark.parametrize(
        ("sizes", "gpus", "flags"),
        [
            (Sizes(tp=2, pp=2), (2, 4, 6, 8), "--tp-size 2 --pp-size 2 --base-gpu-id 2 --gpu-id-step 2"),
            (Sizes(tp=2, dp=4), (), "--tp-size 8 --pp-size 1 --dp-size 4 --enable-dp-attention --enable-dp-lm-head"),
        ],
    )
    def test_sizes_and_gpus(self, sizes: Sizes, gpus: tuple[int, ...], flags: str) -> None:
        assert role_flags(sizes, gpus) == flags.split()

    def test_the_pool_has_room_for_all_requests(self) -> None:
        flags = ServerPlan("m", concurrency=16, longest=8224, page_size=64).common_flags
        pool = int(flags[flags.index("--max-total-tokens") + 1])
        assert pool % 64 == 0
        assert 16 * 8224 < pool < 16 * 8224 * 1.5

    def test_a_pair_without_gpus_runs_on_the_cpu(self, tmp_path: Path) -> None:
        (side,) = parse_sides("kvctl")
        pair = Pair(side, ServerPlan("m", flags=["--more"]), tmp_path / "pair")
        command, environment = pair.decode.command, pair.decode.environment
        assert "--more" in command
        assert command[command.index("--device") + 1] == "cpu"
        assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
        on_gpus = Pair(side, ServerPlan("m", prefill_gpus=(0,), decode_gpus=(1,)), tmp_path / "gpus").decode
        assert "--device" not in on_gpus.command
        assert on_gpus.command[on_gpus.command.index("--base-gpu-id") + 1] == "1"
        assert "SGLANG_USE_CPU_ENGINE" not in on_gpus.environment


class Server:
    """Answers /generate; `tokens` are streamed one by one."""

    def __init__(self) -> None:
        self.tokens = [5, 6, 7]
        self.status = 200
        self.last: Mapping[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append(asked)
                self.send_response(server.status)
                events = [{"output_ids": server.tokens[:end]} for end in range(1, len(server.tokens) + 1)]
                if server.last:
                    events.append(dict(server.last))
                if not asked.get("stream"):
                    body = b"the reason"
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                    return
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for text in (*map(json.dumps, events), "[DONE]"):
                    line = f"data: {text}\n\n".encode()
                    self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer((HOST, 0), Handler)
        self.http.daemon_threads = False
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def end(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(DEADLINE_S)


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode server."""
    both = Server(), Server()
    yield both
    for server in both:
        server.end()


def pair_at(servers: tuple[Server, Server], folder: Path) -> Pair:
    (side,) = parse_sides("nixl")
    pair = Pair(side, ServerPlan("m"), folder / "pair")
    assert pair.prefill is not None
    pair.prefill.process.port, pair.decode.port = (server.http.server_port for server in servers)
    return pair


class TestRequests:
    def test_both_servers_get_the_room_and_decode_has_the_tokens(
        self, servers: tuple[Server, Server], tmp_path: Path
    ) -> None:
        pair = pair_at(servers, tmp_path)
        generated = pair.generate([1, 2, 3], 3)
        assert generated.tokens == [5, 6, 7]
        assert 0 < generated.first_s < DEADLINE_S
        assert generated.token_s is not None
        (at_prefill,), (at_decode,) = (server.asked for server in servers)
        assert at_decode == {**at_prefill, "stream": True}
        assert (at_prefill["input_ids"], at_prefill["sampling_params"]["max_new_tokens"]) == ([1, 2, 3], 3)

    def test_one_token_has_no_time_per_token(self, servers: tuple[Server, Server], tmp_path: Path) -> None:
        servers[1].tokens = [5]
        assert pair_at(servers, tmp_path).generate([1], 1).token_s is None

    def test_too_few_tokens_are_an_error(self, servers: tuple[Server, Server], tmp_path: Path) -> None:
        servers[1].last = {"output_ids": [5], "meta_info": {"finish_reason": {"type": "abort", "message": "KV lost"}}}
        with pytest.raises(ServerError, match=r"too few tokens.*KV lost"):
            pair_at(servers, tmp_path).generate([1], 3)

    def test_an_error_event_is_an_error(self, servers: tuple[Server, Server], tmp_path: Path) -> None:
        servers[1].last = {"error": {"message": "aborted"}}
        with pytest.raises(ServerError, match=r"decode: .*aborted"):
            pair_at(servers, tmp_path).generate([1], 3)

    def test_the_reason_of_prefill_is_told(self, servers: tuple[Server, Server], tmp_path: Path) -> None:
        servers[0].status = 400
        servers[1].tokens = []
        with pytest.raises(ServerError, match=r"decode generated too few tokens.*; prefill: 400 the reason"):
            pair_at(servers, tmp_path).generate([1], 3)

    def test_a_server_that_is_gone_is_an_error(self, tmp_path: Path) -> None:
        (side,) = parse_sides("undivided")
        with pytest.raises(ServerError, match="server: ConnectionRefusedError"):
            Pair(side, ServerPlan("m"), tmp_path / "pair").generate([1], 3)
