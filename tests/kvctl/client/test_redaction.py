"""Redaction removes names of hosts and users, addresses, paths, keys and request ids from every field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault
from kvctl.client.recordings import Answer, RecordedAgent, RecordedSnapshot
from kvctl.client.redaction import Redaction

KEY = "0123456789abcdef" * 4


def ours() -> Redaction:
    return Redaction(["node7", "node7.rack.example.com"], ["ada", "lovelace"], ["/homes/ada", "/run/user/1000/kvctl"])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/run/user/1000/kvctl/decode-0.sock belongs to ada: run", "path-3 belongs to user-1: run"),
        ("cannot reach tcp://10.1.2.3:5000.", "cannot reach tcp://address-1:5000."),
        ("tcp://[2001:db8::1]:5000 and tcp://*:9", "tcp://address-1:5000 and tcp://*:9"),
        ("node7-prefill-0 at Node7.rack.example.com", "host-1-prefill-0 at host-2"),
        ("lost gpu-b12 (tcp://gpu-b12:7000)", "lost host-3 (tcp://host-3:7000)"),
        ("host=gpu-c1,device=mlx5_0; gpu-c1 is slow", "host=host-3,device=mlx5_0; host-3 is slow"),
        ("see https://wiki.corp.example/kv?x=1", "see https://host-3"),
        (f"refuses our key {KEY}", "refuses our key key-1"),
        ("aa:bb:cc:dd:ee:ff, fe80::1%eth0, ::1", "address-1, address-2, address-3"),
        ("--include=/usr/include -I/opt/x ~/.ssh/id", "--include=path-3 path-5 path-4"),
        ("file /etc/kvctl/agent.toml", "file path-3"),
        (
            "at 12:34:56 3/8 of prefill/decode, GB/s, 1.5.1, std::string",
            "at 12:34:56 3/8 of prefill/decode, GB/s, 1.5.1, std::string",
        ),
        ("Adams said adapt", "Adams said adapt"),
        (
            "/srv/kvctl_agent/runtime/control_loop.py:12 run: self.x()",
            "kvctl_agent.runtime.control_loop:12 run: self.x()",
        ),
        ("/usr/lib/python3.11/threading.py:9 f: open('/etc/x')", "threading:9 f: open('path-3')"),
        ("/x/site-packages/zmq/poll.py:3 poll", "zmq.poll:3 poll"),
        ("/homes/ada/my app/run.py:4 <module>", "path-3:4 <module>"),
        ("<frozen runpy>:198 _run", "<frozen runpy>:198 _run"),
    ],
)
def test_what_is_taken_out_of_a_text(text: str, left: str) -> None:
    redaction = ours()
    redaction.learn(text)
    assert redaction.text(text) == left
    assert redaction.text(left) == left


def test_the_directory_of_shared_memory_stays() -> None:
    text = "/dev/shm          23.5 GiB free; /dev/shm/nixl-7 is a file"
    assert Redaction().text(text) == "/dev/shm          23.5 GiB free; path-1 is a file"


def test_the_same_has_the_same_name_everywhere_and_another_has_another() -> None:
    redaction = ours()
    first = redaction.text("/a/b and /a/c")
    assert redaction.document({"endpoint": "ipc:///a/c", "text": ["/a/b"]}) == {
        "endpoint": f"ipc://{first.split()[2]}",
        "text": [first.split()[0]],
    }


def test_words_by_which_tables_are_made_stay() -> None:
    redaction = Redaction(["decode"], ["rooms"])
    row = {"role": "decode", "state": "ready", "rooms": 2, "peer": "decode-0"}
    assert redaction.document(row) == {"role": "decode", "state": "ready", "rooms": 2, "peer": "host-1-0"}


def test_names_of_fields_that_are_names_of_agents_go_too() -> None:
    assert ours().document({"owed": {"node7-prefill-0": 3}}) == {"owed": {"host-1-prefill-0": 3}}


NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)
SECRETS = st.one_of(
    NAMES.map(lambda name: (f"/{name}/etc/x", f"/{name}/etc")),
    NAMES.map(lambda name: (f"tcp://q{name}.corp:80 and q{name}.corp", f"q{name}.corp")),
    st.ip_addresses(v=4).map(lambda address: (str(address), str(address))),
    st.ip_addresses(v=6).filter(lambda address: str(address).count(":") > 1).map(lambda one: (str(one), str(one))),
    st.binary(min_size=32, max_size=32).map(lambda key: (key.hex(), key.hex())),
    st.sampled_from([("on node7 by ada", "node7"), ("/homes/ada/x y", "/homes/ada"), ("lovelace", "lovelace")]),
)


@given(st.lists(SECRETS, max_size=4), st.lists(st.sampled_from([" ", ", ", " (", "='", "\n", "\t", "; "]), min_size=4))
def test_no_secret_survives_in_any_surroundings(secrets: list[tuple[str, str]], between: list[str]) -> None:
    text = "said" + "".join(gap + said for gap, (said, _) in zip(between, secrets, strict=False))
    redaction = ours()
    redaction.learn(text)
    left = redaction.text(text)
    for _, secret in secrets[: len(between)]:
        assert secret.lower() not in left.lower()


def test_a_moment_keeps_its_shape(canned: Any) -> None:
    endpoint = Endpoint("node7-decode-0", Path("/run/user/1000/kvctl/node7-decode-0.sock"))
    hello = canned.hello("decode-0")
    hello["name"] = endpoint.name
    data = {"hello": hello, **{name: getattr(canned, name)("decode-0") for name in ("status", "peers", "config")}}
    told = [Answer(command, None, answer) for command, answer in data.items()]
    silence = Answer("hello", None, None, Fault("x", "unreachable", "10.0.0.9 is down"))
    gone = RecordedAgent(Endpoint("x", None, remote="tcp://10.0.0.9:1"), 0, ClockOffset(0, 0), [silence])
    living = RecordedAgent(endpoint, 9, ClockOffset(0, 1), told)
    found = ours().snapshot(RecordedSnapshot(1, Path("/run/user/1000/kvctl"), [], [], [gone, living], []))
    text = str(found.document())
    assert "node7" not in text
    assert "/run" not in text
    assert "10.0.0.9" not in text
    first, second = found.agents
    assert second.hello.data["name"] == second.endpoint.name == "host-1-decode-0"
    status = second.find("status")
    assert status is not None
    assert status.data["role"] == "decode"
    assert first.endpoint.remote == "tcp://address-1:1"


def test_hosts_that_are_called_as_fields_of_the_file_do_not_break_it(canned: Any) -> None:
    endpoint = Endpoint("data-decode-0", Path("/run/data-decode-0.sock"))
    agent = RecordedAgent(endpoint, 9, ClockOffset(0, 1), [Answer("hello", None, canned.hello("decode-0"))])
    moment = RecordedSnapshot(1, Path("/run"), [], [], [agent], [])
    found = Redaction(["data", "answers"], ["agents", "stale"]).snapshot(moment)
    assert found.agents[0].endpoint.name == "host-1-decode-0"


def test_a_request_id_is_replaced_as_a_whole() -> None:
    redaction = Redaction()
    rows = [{"request_id": name} for name in ("ada's own id", None, "cmpl-2", "ada's own id")]
    replaced = [{"request_id": name} for name in ("request-1", None, "request-2", "request-1")]
    assert redaction.document(rows) == replaced
    assert redaction.document(replaced) == replaced


def test_network_devices_keep_their_names_and_lose_their_addresses(canned: Any) -> None:
    answer = canned.nics("prefill-0")
    answer["nics"][0]["gids"].append(
        {"index": 1, "gid": "fe80::a288:c2ff:fe00:6", "kind": "RoCE v2", "interface": "rail0"}
    )
    document = {
        "host": "gpu-rack7-03",
        "nics": answer,
        "peers": [{"peer_host": "gpu-rack7-04", "process": "4 on gpu-rack7-04"}],
    }
    redaction = Redaction()
    redaction.learn(document)
    redacted = redaction.document(document)
    text = json.dumps(redacted)
    assert not [secret for secret in ("fe80", "10.0.1", "rack7", "a288", "node-3") if secret in text]
    assert redacted["peers"][0] == {"peer_host": "host-3", "process": "4 on host-3"}
    first = redacted["nics"]["nics"][0]
    assert (first["name"], first["pci"], first["gids"][0]["kind"]) == ("mlx5_0:1", "0000:18:00.0", "RoCE v2")
    assert redacted["nics"]["lane"] == answer["lane"]
