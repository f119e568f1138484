"""Panels of `kvctl top`: one for each view, and the panels that Enter opens for a room, a pair of agents or a row."""
