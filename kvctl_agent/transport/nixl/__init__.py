"""The `nixl` transport: NIXL's binding, its requests, and the transport itself."""
