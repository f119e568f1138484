"""Observes vLLM's own KV connectors: the requests that they transfer, and the outcome of each."""
