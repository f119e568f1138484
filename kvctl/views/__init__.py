"""One declared view per kind of data; tables, TSV, CSV and JSON are all rendered from it."""

from __future__ import annotations
