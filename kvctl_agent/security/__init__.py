"""Keys of an agent's sockets: CURVE, and the thread that decides who is let in."""
