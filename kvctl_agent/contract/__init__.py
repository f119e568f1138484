"""What the operator's tool and the agent agree on: names, types and wire constants.

Torch-free and standard-library only, so that `kvctl` can import it in milliseconds. Every name that appears in
help, JSON, metrics, completions or docs is declared in here once.
"""

from __future__ import annotations
