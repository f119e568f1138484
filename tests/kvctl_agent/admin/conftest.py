"""A client of admin sockets."""

from __future__ import annotations

from tests.support.admin_client import connect

__all__ = ["connect"]
