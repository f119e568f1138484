"""Tests of fleets whose ranks run on hosts of their own, joined by a network with faults."""
