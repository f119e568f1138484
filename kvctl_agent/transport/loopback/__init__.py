"""The `loopback` transport: agents of one host without an engine."""
