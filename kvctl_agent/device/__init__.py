"""GPU support: device memory, streams, events and peer mappings over the CUDA driver, and the row copy kernel.

The package never imports torch.
"""

from __future__ import annotations
