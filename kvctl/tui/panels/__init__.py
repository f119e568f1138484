"""Panels: one per view, and those that Enter opens on a room, a pair or a row."""
