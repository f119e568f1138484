"""The commands: each parses, asks the client and hands what came back to a view."""

from __future__ import annotations
