"""How a part moves: bulk, slice and staged behind one interface, and the cost model that chooses between them."""

from __future__ import annotations
