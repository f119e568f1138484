"""The `mooncake` transport: Mooncake's engine, its writes, tag connections, and the transport itself."""
