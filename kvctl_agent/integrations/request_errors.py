"""Keeps an error in one request from the engine that calls a connector, which would end with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvctl_agent.errors import KvctlError

_Result = TypeVar("_Result")


def attempt(call: Callable[[], _Result], fail: Callable[[str], None], logger: logging.Logger) -> _Result | None:
    """Returns the result of a call for one request; None if it raises: then `fail` is called with the cause.

    The errors of kvctl say what is wrong with the request. Any other one is a bug, whose traceback is logged.
    """
    try:
        return call()
    except KvctlError as error:
        fail(str(error))
    except Exception as error:
        logger.exception("kvctl: a request fails because of an unexpected error")
        fail(f"{type(error).__name__}: {error}")
    return None
