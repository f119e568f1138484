"""Processes that answer HTTP, as SGLang's servers do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.lab.bench.sglang_servers import HOST, START_S, Process, ServerError, cpu_environment, wait_ready
from kvctl.lab.tcp_ports import free_port

DEADLINE_S = 60


def web_server(folder: Path, port: int) -> Process:
    """A server that has /health, in a child of the process that is started, as SGLang's router."""
    (folder / "health").touch()
    command = ["-m", "http.server", str(port), "--bind", HOST]
    return Process("server", ["sh", "-c", f"{sys.executable} {' '.join(command)}; true"], {}, folder / "log", port)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    process = web_server(tmp_path, free_port())
    yield process
    process.kill()


def test_a_server_is_ready_once_a_process_of_its_group_answers(server: Process) -> None:
    server.start()
    lines: list[str] = []
    wait_ready([server], lines.append)
    assert lines[0].startswith("server: ready after ")


@pytest.mark.parametrize("healthy", [True, False])
def test_a_server_is_not_ready_because_another_process_answers_on_its_port(server: Process, healthy: bool) -> None:
    server.start()
    wait_ready([server], lambda text: None)
    if not healthy:
        (server.log.parent / "health").unlink()  # the answer is 404
    late = Process("late", ["sleep", str(DEADLINE_S)], {}, server.log, server.port)
    late.start()
    try:
        assert server.ready() is healthy
        assert not late.ready()
        late.started -= START_S
        with pytest.raises(
            ServerError, match=f"late is not ready after .*: another process answers on port {late.port}"
        ):
            late.ready()
    finally:
        late.kill()


def test_a_server_that_ended_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    script = r"printf '\033[1;31mthe cause\033[0m\n'; exit 3"
    process = Process("server", ["sh", "-c", script], {}, tmp_path / "log", free_port())
    process.start()
    with pytest.raises(ServerError, match=r"server ended with 3\n--- the end of .*log\nthe cause"):
        wait_ready([process])


def test_each_rank_of_a_server_without_a_gpu_names_its_cores() -> None:
    assert cpu_environment(ranks=20)["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 19
