"""Finds problems of a fleet: health codes and the engine that runs them, verdicts, and checks of this host."""
