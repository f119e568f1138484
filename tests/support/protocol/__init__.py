"""The protocol machines in a simulated world, and an oracle that checks every step."""
