"""`kvctl preflight`: a process for each rank of a planned layout, on its host, and the measurements between them."""
