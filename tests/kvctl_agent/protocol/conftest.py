"""Puts this folder's `simulation` within reach of its tests, however pytest is started."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
