"""Threads of an agent: the control loop, transfer workers or the arrival loop, and the poller of the engine's events.

Each thread owns the objects that it changes; threads exchange immutable messages through queues. A call from the
engine's own thread only puts a message into a queue.
"""

from __future__ import annotations
