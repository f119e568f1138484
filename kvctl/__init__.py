"""The operator's tool: shows, measures and checks KV-cache transfer; queries agents over their admin sockets only."""

from __future__ import annotations
