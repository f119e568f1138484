"""One declared view per kind of data; tables, TSV, CSV, JSON and YAML are all rendered from it."""

from __future__ import annotations
