"""The transfer plan: which prefill rank sends which bytes to which decode rank.

The package is pure integer arithmetic, computed on both sides from the same inputs. It uses no transport, tensor or
clock, so the tests check every rule against a brute-force oracle. Other packages take geometry from the plan and never
derive it again.
"""

from __future__ import annotations
