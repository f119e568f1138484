"""Replays recorded inputs through the state machines, finds the first violated invariant and shortens its trace."""
