"""Authentication and encryption of an agent's sockets: CURVE keys, ZAP, and Unix sockets restricted to one user."""
