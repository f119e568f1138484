"""Implements `kvctl bench`: measures transfers between rank processes, and prints, saves and plots the results."""

from __future__ import annotations
