"""`kvctl bench`: programs of trials on fleets of rank processes, their results, tables and HTML report."""

from __future__ import annotations
