"""GPU support: device memory, streams, events and peer mappings over the CUDA driver, and the row copy kernel.

Never imports torch.
"""

from __future__ import annotations
