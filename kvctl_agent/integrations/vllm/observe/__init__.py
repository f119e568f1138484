"""Observes vLLM's own NIXL connectors: the requests that they transfer, and the outcome of each."""
