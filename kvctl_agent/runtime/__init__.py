"""The threads: one control loop, transfer workers, one arrival loop.

Each owns what it touches; what crosses between them is a queue of immutable messages. The engine's own thread only
ever puts something into a queue.
"""

from __future__ import annotations
