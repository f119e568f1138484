"""A short private socket directory, admin servers in it, and their clients."""

from __future__ import annotations

from tests.support.admin_client import connect, directory, serve

__all__ = ["connect", "directory", "serve"]
