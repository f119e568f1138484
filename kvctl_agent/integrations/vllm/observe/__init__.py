"""Observes vLLM's own NixlConnector: the requests that they transfer, and the outcome of each."""
