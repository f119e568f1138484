"""Hooks do not change what they hook, and one that fails goes away."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvctl_agent.integrations.observe.hooks import after, before


class Target:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def act(self, value: int, *, more: int = 0) -> int:
        self.calls.append((value, more))
        return value + more


def subclass() -> Any:
    return type("Own", (Target,), {})


@pytest.mark.parametrize("put", [before, after])
def test_a_hook_changes_neither_arguments_nor_result_of_its_class_alone(put: Any) -> None:
    own, seen = subclass(), []
    put(own, "act", lambda *args, **kwargs: seen.append((args[-1], kwargs)))
    target, other = own(), Target()
    assert target.act(1, more=2) == 3
    assert other.act(5) == 5
    assert target.calls == [(1, 2)]
    assert seen == [(1, {"more": 2})]


@pytest.mark.parametrize("put", [before, after])
def test_a_hook_that_fails_is_removed_with_one_line(put: Any, caplog: Any) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    own = subclass()
    put(own, "act", fails)
    target = own()
    with caplog.at_level(logging.ERROR, "kvctl"):
        assert [target.act(value) for value in range(3)] == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == ["kvctl: hook on Own.act removed: RuntimeError: no"]


def test_what_the_hooked_method_raises_is_raised() -> None:
    own, seen = subclass(), []
    after(own, "act", lambda *_: seen.append(1))
    with pytest.raises(TypeError):
        own().act("text", more=1)
    assert seen == []


def test_a_hook_after_a_coroutine_has_its_result() -> None:
    class Own:
        async def act(self, value: int) -> int:
            return value + 1

    results: list[Any] = []
    after(Own, "act", lambda _, result, *arguments: results.append((result, arguments[1:])))
    assert asyncio.run(Own().act(1)) == 2
    assert results == [(2, (1,))]


def test_an_inherited_method_gets_a_hook_once() -> None:
    own, calls = subclass(), []

    def hook(*_: Any) -> None:
        calls.append(1)

    before(own, "act", hook)
    heir = type("Heir", (own,), {})
    assert before(heir, "act", hook)
    heir().act(1)
    assert calls == [1]


def test_a_class_without_the_method_stays_as_it_is() -> None:
    own = subclass()
    assert not before(own, "unknown", print)
    assert not hasattr(own, "unknown")
