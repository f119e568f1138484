"""The `mooncake` transport."""
