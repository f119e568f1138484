"""Health codes, their engine, mutes and thresholds, and checks of this host."""
