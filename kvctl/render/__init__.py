"""Views: the columns of each kind of data, from which tables, TSV, CSV, JSON and YAML are rendered."""

from __future__ import annotations
