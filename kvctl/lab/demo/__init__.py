"""Live fleets of `kvctl demo`: traffic, faults and scenarios, accounting of every room, and endurance runs."""
