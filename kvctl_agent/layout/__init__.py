"""Who sends which bytes to whom: pure integer arithmetic that both sides compute from the same inputs.

Nothing here knows a transport, a tensor or a clock, so every rule can be checked against a brute-force oracle.
Downstream never re-derives geometry: it asks the plan.
"""

from __future__ import annotations
