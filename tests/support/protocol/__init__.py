"""The protocol machines in a simulated world, with an oracle that checks every step."""
