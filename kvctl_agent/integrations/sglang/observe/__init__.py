"""Observer of SGLang's own transfer backends (KVCTL_SGLANG=observe): serves them on kvctl's admin socket, read only."""
