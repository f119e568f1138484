"""Puts this folder's `matrix_rig` within reach of its tests and of the processes they start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
