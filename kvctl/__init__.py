"""The operator's tool: see, measure and check KV-cache transfer. Talks to agents over their admin sockets only."""

from __future__ import annotations
