"""Which settings suit a machine and a workload: measure what things cost, predict, and confirm with the bench."""
