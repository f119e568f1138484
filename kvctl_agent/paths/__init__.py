"""Transfer paths (bulk, slice, staged, direct) behind one interface, and the cost model that chooses between them."""

from __future__ import annotations
