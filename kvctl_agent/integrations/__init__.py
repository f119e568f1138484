"""Integrations: an engine's own transfer interface in front of `Agent`. Each imports its engine only when loaded."""
