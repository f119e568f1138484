"""Soak runs: random faults and garbage against live fleets, with a verdict at the end."""
