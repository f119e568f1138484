"""Requests that the contract does not declare are refused."""

from __future__ import annotations

import pytest

from kvctl.client.calls import Call


def test_unset_arguments_are_left_out() -> None:
    assert Call("rooms", {"state": None, "limit": 5}).args == {"limit": 5}


@pytest.mark.parametrize(
    ("command", "args"),
    [("rroms", {}), ("rooms", {"room": "1"}), ("room", {}), ("room", {"room": None})],
    ids=["unknown command", "unknown argument", "missing argument", "unset argument"],
)
def test_what_is_not_declared_is_refused(command: str, args: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"declares no|takes"):
        Call(command, args)
