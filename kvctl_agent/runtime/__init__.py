"""The control loop of an agent with its tasks (transfers, arrivals, the engine's events), its sockets and its handles.

Each thread owns the objects that it changes; threads exchange immutable messages through queues. A call from the
engine's own thread only puts a message into a queue.
"""

from __future__ import annotations
