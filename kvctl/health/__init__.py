"""Finds problems of a fleet: health codes and the engine that runs them, mutes, thresholds, and checks of this host."""
