"""Live fleets for `kvctl demo` and soak runs: traffic, faults, scenarios, and accounting of every room."""
