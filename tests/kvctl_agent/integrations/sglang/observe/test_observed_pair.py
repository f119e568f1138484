"""SGLang's own backends in rank processes, seen through the admin sockets of the plugin's observe mode."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.sglang.cases import Case, Model, Ranks, Room
from tests.support.sglang.pair import PDPair
from tests.support.sglang.runtime import STAGES_HOST_MEMORY, VERSION

OBSERVE = {"KVCTL_SGLANG": "observe", "KVCTL_OBSERVER": "process"}
HEADS_8 = Model(heads=8, layers=2)
TOKEN_BYTES = HEADS_8.layers * 2 * HEADS_8.heads * HEADS_8.head_dim * 2
STAGED = {"prefill": Ranks(tp=2), "model": HEADS_8, "staging": True}
DEADLINE_S = 30.0
with_staging = pytest.mark.skipif(not STAGES_HOST_MEMORY, reason="staging of this release of SGLang needs CUDA")


@pytest.fixture(autouse=True)
def sockets(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the admin sockets."""
    directory = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("KVCTL_SOCKET_DIR", str(directory))
    return directory


def kvctl(*arguments: str) -> Any:
    """Returns the rows that a command prints as JSON."""
    command = [sys.executable, "-m", "kvctl", "--timeout", "20s", *arguments, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["data"]


def until(read: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    """Returns what `read` returns as soon as it holds; fails with the last answer at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds(found := read()):
        assert time.monotonic() < deadline, found
    return found


def without_pinned_memory(scheduler: Any) -> None:
    """Makes SGLang's Mooncake sender take page indices as NIXL's does: it asks for memory pinned by CUDA."""
    from sglang.srt.disaggregation.utils import KVClassType, get_kv_class

    get_kv_class(scheduler.backend, KVClassType.SENDER).supports_host_tensor_indices = False


def open_room(scheduler: Any) -> None:
    """Opens a room in SGLang's manager."""
    scheduler.kv_manager.update_status(77, 1)


def role(rows: Any, name: str) -> list[Any]:
    return [row for row in rows if row["agent"].startswith(name)]


def doctor() -> list[Any]:
    return [row for row in kvctl("doctor") if row["rank"] is not None]


@with_staging
def test_rooms_of_staging_from_both_ends_until_decode_is_frozen(sockets: Path) -> None:
    rooms = [Room(1, tokens=64), Room(2, tokens=128, chunks=(64,))]
    with PDPair(Case("nixl", environment=OBSERVE, **STAGED)) as pair:
        assert {rank.names["manager"] for rank in pair.all()} == {"NixlKVManager"}
        pair.transfer(rooms).check()
        assert {path.stat().st_mode & 0o777 for path in sockets.glob("*.sock")} == {0o600}
        status = kvctl("status")
        assert sorted(row["name"].partition("@")[0] for row in status) == ["decode-tp0", "prefill-tp0", "prefill-tp1"]
        observe = {"engine": "sglang", "engine_version": VERSION, "mode": "observe", "settings": {}}
        assert [row["integration"] for row in status] == [observe] * 3
        rows = until(lambda: kvctl("rooms", "history"), lambda rows: len(rows) == 6)
        assert {row["state"] for row in rows} == {"Success"}
        assert {(row["room"], row["bytes"]) for row in role(rows, "decode")} == {
            ("1", 64 * TOKEN_BYTES),
            ("2", 128 * TOKEN_BYTES),
        }
        assert {(row["room"], row["bytes"], row["parts"]) for row in role(rows, "prefill")} == {
            ("1", 32 * TOKEN_BYTES, 1),
            ("2", 64 * TOKEN_BYTES, 2),
        }
        assert all(
            row["paths"] in ({"staged": n}, f"staged={n}") for row in role(rows, "decode") for n in [row["parts"]]
        )
        decode = next(row["name"] for row in status if row["role"] == "decode")
        assert {peer for row in role(rows, "prefill") for peer in row["peers"]} == {decode}
        (ring,) = [row for row in kvctl("staging") if row["agent"] == decode]
        assert ring["ring"]["allocations"] == []
        events = kvctl("rooms", "show", "2")
        assert "scatter" in json.dumps(events)
        refused = subprocess.run(
            [sys.executable, "-m", "kvctl", "drain", "--yes", decode], capture_output=True, text=True, check=False
        )
        assert refused.returncode != 0
        assert "observe mode: SGLang owns admission" in refused.stderr
        pair.freeze("decode")
        first, rows = doctor()[0], kvctl("rooms", "history")
        pair.thaw("decode")
        assert (first["code"], first["subject"]) == ("KV_PROCESS_STOPPED", decode)
        assert len(rows) == 6


@pytest.mark.parametrize("backend", [pytest.param("nixl", marks=pytest.mark.sample), "mooncake"])
def test_rooms_of_equal_ranks_until_prefill_is_killed(backend: str) -> None:
    with PDPair(Case(backend, environment=OBSERVE)) as pair:
        pair.call("prefill", without_pinned_memory)
        pair.transfer([Room(1, tokens=100), Room(2, tokens=128, chunks=(64,), prefix=32)]).check()
        rows = until(lambda: kvctl("rooms", "history"), lambda rows: len(rows) == 4)
        assert {row["state"] for row in rows} == {"Success"}
        assert [sorted(row["bytes"] for row in role(rows, name)) for name in ("prefill", "decode")] == [
            [6 * 16 * 1024, 7 * 16 * 1024]
        ] * 2
        assert {row["pages"] for row in role(rows, "prefill")} == {6, 7}
        pair.call("decode", open_room)
        assert [row["room"] for row in kvctl("rooms")] == ["77"]
        pair.kill("prefill")
        first = doctor()[0]
        assert (first["code"], first["subject"][:12]) == ("KV_PEER_LOST", "prefill-tp0@")
        assert "its process has ended" in first["cause"]


@with_staging
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_doctor_names_a_staging_pool_that_is_too_small(backend: str) -> None:
    model = Model(heads=8, layers=32, head_dim=64)
    case = Case(
        backend,
        prefill=Ranks(tp=2),
        model=model,
        staging=True,
        chunked_prefill_size=512,
        environment=OBSERVE,
        decode_environment={"SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "1"},
    )
    with PDPair(case) as pair:
        pair.call("prefill", without_pinned_memory)
        pair.transfer([Room(1, tokens=512)], settle=False)
        first = doctor()[0]
        assert first["code"] == "KV_CHUNK_OVERSIZED"
        assert first["subject"].startswith("decode-tp0@")
        assert "SGLANG_DISAGG_STAGING_POOL_SIZE_MB=32 or more" in first["remedy"]
        (failed,) = kvctl("rooms", "failed")
        assert failed["code"] == "KV_CHUNK_OVERSIZED"


def test_first_causes_of_rooms_that_one_end_gave_up() -> None:
    timeouts = {f"SGLANG_DISAGGREGATION_{name}_TIMEOUT": "3" for name in ("BOOTSTRAP", "WAITING")}
    with PDPair(Case("nixl", environment=OBSERVE | timeouts)) as pair:
        # NIXL's sender tells nobody that it was aborted, so decode times out; decode never hears of the second room.
        aborted = Room(1, tokens=128, chunks=(64,), abort_prefill="chunk")
        pair.transfer([aborted, Room(2, opened=False)], settle=False)
        first, second = until(
            lambda: sorted(kvctl("rooms", "failed"), key=lambda row: row["room"]), lambda r: len(r) > 1
        )
        assert (first["code"], first["text"], first["rank"][:12]) == ("ABORTED", "Aborted by AbortReq.", "prefill-tp0@")
        assert [len(row["agents"]) for row in (first, second)] == [2, 1]
        assert second["code"] == "KV_ROOM_STUCK_BOOTSTRAP"
        assert doctor()[0]["code"] == "KV_ROOM_STUCK_BOOTSTRAP"
