"""A request is checked completely before a handler sees it; every refusal has a code and tells the way out."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.contract.admin import MAGIC, MAX_REQUEST_BYTES, MAX_REQUEST_ID_BYTES, ErrorCode
from kvctl_agent.contract.commands import COMMANDS, COMMANDS_BY_NAME, Arg, Command
from kvctl_agent.contract.states import MAX_ROOM
from kvctl_agent.errors import RequestRefused
from kvctl_agent.observer.requests import parse_body, parse_frames, request_id


def refusal(body: object) -> RequestRefused:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    with pytest.raises(RequestRefused) as caught:
        parse_body(raw)
    return caught.value


class TestFrames:
    def test_magic_id_body(self) -> None:
        assert parse_frames([MAGIC, b"7", b"{}"]) == b"{}"
        assert request_id([MAGIC, b"7", b"{}"]) == b"7"

    @pytest.mark.parametrize(
        ("frames", "code"),
        [
            ([], ErrorCode.PROTOCOL),
            ([b""], ErrorCode.PROTOCOL),
            ([b"GET / HTTP/1.1"], ErrorCode.PROTOCOL),
            ([b"KVA2", b"1", b"{}"], ErrorCode.PROTOCOL),
            ([MAGIC], ErrorCode.BAD_REQUEST),
            ([MAGIC, b"1"], ErrorCode.BAD_REQUEST),
            ([MAGIC, b"1", b"{}", b""], ErrorCode.BAD_REQUEST),
            ([MAGIC, b"i" * (MAX_REQUEST_ID_BYTES + 1), b"{}"], ErrorCode.BAD_REQUEST),
            ([MAGIC, b"1", b" " * (MAX_REQUEST_BYTES + 1)], ErrorCode.TOO_LARGE),
        ],
    )
    def test_anything_else_is_refused(self, frames: list[bytes], code: ErrorCode) -> None:
        with pytest.raises(RequestRefused) as caught:
            parse_frames(frames)
        assert caught.value.code == code

    def test_the_limits_themselves_are_allowed(self) -> None:
        body = b" " * MAX_REQUEST_BYTES
        assert parse_frames([MAGIC, b"i" * MAX_REQUEST_ID_BYTES, body]) is body

    def test_an_oversized_id_is_not_sent_back(self) -> None:
        assert request_id([MAGIC, b"i" * 65, b"{}"]) == b""
        assert request_id([MAGIC]) == b""


class TestCommands:
    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_each_declared_command_is_understood(self, command: Command) -> None:
        numbers = {arg.name: "7" if arg.type == "room" else 7 for arg in command.args if arg.type in ("room", "int")}
        words = {arg.name: "word" for arg in command.args if arg.type == "str" and not arg.choices}
        request = parse_body(orjson.dumps({"cmd": command.name, "args": {**numbers, **words}}))
        assert request.command is command
        assert request.args == {**dict.fromkeys(numbers, 7), **words}

    def test_an_unknown_one_names_the_nearest(self) -> None:
        error = refusal({"cmd": "romms"})
        assert error.code == ErrorCode.UNKNOWN_COMMAND
        assert str(error).startswith("unknown command 'romms', did you mean rooms")

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"\xff\xfe", b"[]", b"1", b"null", {}, {"cmd": 3}, {"cmd": None}, {"cmd": ["rooms"]}, b"[" * 5000],
    )
    def test_what_is_no_request(self, body: object) -> None:
        assert refusal(body).code == ErrorCode.BAD_REQUEST

    def test_an_unknown_field(self) -> None:
        assert "'arg'" in str(refusal({"cmd": "rooms", "arg": {}}))

    @pytest.mark.parametrize("args", [[], "x", 3, True])
    def test_args_must_be_an_object(self, args: object) -> None:
        assert refusal({"cmd": "rooms", "args": args}).code == ErrorCode.BAD_ARGUMENT

    @pytest.mark.parametrize("body", [{"cmd": "rooms"}, {"cmd": "rooms", "args": None}, {"cmd": "rooms", "args": {}}])
    def test_args_may_be_left_out(self, body: object) -> None:
        assert parse_body(orjson.dumps(body)).args == {}

    def test_a_terminal_is_safe_from_what_a_client_wrote(self) -> None:
        text = str(refusal({"cmd": "\x1b[31m" + "x" * 100_000}))
        assert text.isprintable()
        assert len(text) < 200


class TestArguments:
    def test_an_unknown_one_names_the_nearest_and_the_known(self) -> None:
        error = refusal({"cmd": "rooms", "args": {"limmit": 3}})
        assert error.code == ErrorCode.BAD_ARGUMENT
        assert str(error) == "rooms has no argument 'limmit' (it takes state, limit), did you mean limit?"
        assert "it takes no arguments" in str(refusal({"cmd": "status", "args": {"x": 1}}))

    def test_a_required_one_must_be_there(self) -> None:
        for args in ({}, {"room": None}):
            assert "room needs the argument room" in str(refusal({"cmd": "room", "args": args}))

    def test_null_is_not_given(self) -> None:
        assert parse_body(b'{"cmd":"rooms","args":{"limit":null}}').args == {}

    @pytest.mark.parametrize("text", ["0", "7", "007", str(MAX_ROOM)])
    def test_a_room_is_a_decimal_string(self, text: str) -> None:
        assert parse_body(orjson.dumps({"cmd": "room", "args": {"room": text}})).args == {"room": int(text)}

    @pytest.mark.parametrize(
        "value",
        [7, 7.0, True, "", "-1", "+1", " 7", "7 ", "0x7", "1e3", "٣", "²", "1_0", str(MAX_ROOM + 1), "9" * 9999],
    )
    def test_nothing_else_is_a_room(self, value: object) -> None:
        error = refusal({"cmd": "room", "args": {"room": value}})
        assert error.code == ErrorCode.BAD_ARGUMENT
        assert f"from 0 to {MAX_ROOM}" in str(error)
        assert len(str(error)) < 300

    @pytest.mark.parametrize("value", ["7", 7.0, True, -1, 2**63, 10**40, [], {}])
    def test_an_int_is_an_int(self, value: object) -> None:
        body = json.dumps({"cmd": "rooms", "args": {"limit": value}}).encode()
        assert refusal(body).code == ErrorCode.BAD_ARGUMENT

    def test_a_choice_names_the_nearest(self) -> None:
        assert parse_body(b'{"cmd":"rooms","args":{"state":"Failed"}}').args == {"state": "Failed"}
        assert "did you mean Transferring" in str(refusal({"cmd": "rooms", "args": {"state": "transfering"}}))

    @pytest.mark.parametrize(
        ("kind", "good", "bad"),
        [
            ("bool", [True, False], [0, 1, "true", []]),
            ("str-list", [[], ["a"], ["a", "b"]], ["a", [1], ["a", None], {"a": 1}]),
            ("str", ["", "a"], [1, ["a"], True]),
        ],
    )
    def test_the_other_types(self, kind: str, good: list[object], bad: list[object]) -> None:
        commands = {"c": Command("c", "", args=(Arg("a", kind, "help"),))}  # type: ignore[arg-type]
        for value in good:
            assert parse_body(orjson.dumps({"cmd": "c", "args": {"a": value}}), commands).args == {"a": value}
        for value in bad:
            with pytest.raises(RequestRefused, match="argument a of c"):
                parse_body(orjson.dumps({"cmd": "c", "args": {"a": value}}), commands)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
argument_names = sorted({arg.name for command in COMMANDS for arg in command.args})
near_requests = st.fixed_dictionaries(
    {"cmd": st.sampled_from(sorted(COMMANDS_BY_NAME)) | st.text(max_size=8)},
    optional={"args": json_values | st.dictionaries(st.sampled_from(argument_names), json_values, max_size=3)},
)


def parses_or_refuses(body: bytes) -> None:
    try:
        request = parse_body(body)
    except RequestRefused as refused:
        told = refused
    else:
        assert request.args.keys() <= {arg.name for arg in request.command.args}
        for arg in request.command.args:
            if arg.name in request.args and arg.type in ("int", "room"):
                assert type(request.args[arg.name]) is int
        return
    assert told.code in set(ErrorCode)
    assert str(told)


@given(st.binary(max_size=200))
def test_random_bytes(body: bytes) -> None:
    parses_or_refuses(body)


@given(json_values)
def test_random_json(value: object) -> None:
    parses_or_refuses(json.dumps(value).encode())


@given(near_requests)
def test_nearly_right_requests(value: object) -> None:
    parses_or_refuses(json.dumps(value).encode())


@given(st.lists(st.binary(max_size=80) | st.just(MAGIC), max_size=6))
def test_random_frames(frames: list[bytes]) -> None:
    assert len(request_id(frames)) <= MAX_REQUEST_ID_BYTES
    try:
        body = parse_frames(frames)
    except RequestRefused as refused:
        told = refused
    else:
        assert frames == [MAGIC, frames[1], body]
        return
    assert told.code in set(ErrorCode)
