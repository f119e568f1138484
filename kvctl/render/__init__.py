"""Declares views (the columns of each kind of data) and renders them as tables, TSV, CSV, JSON and YAML."""

from __future__ import annotations
