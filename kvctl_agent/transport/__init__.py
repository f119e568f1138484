"""Moves bytes between processes: one interface (`base`), one module per engine, chosen by name.

Importing this package loads no engine; `open_transport` does.
"""

from __future__ import annotations
