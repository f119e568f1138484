"""What is wrong with a fleet: pure functions from a snapshot, live or recorded, to findings."""
