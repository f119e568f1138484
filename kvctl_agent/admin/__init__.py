"""The admin socket: how an operator's tool asks a living agent, without ever slowing it down."""

from __future__ import annotations
