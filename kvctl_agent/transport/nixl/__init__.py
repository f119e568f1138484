"""The `nixl` transport."""
