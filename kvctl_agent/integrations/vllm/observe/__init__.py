"""Observes vLLM's own KV connectors: which requests move, and what becomes of them."""
