"""Walks every history of a small world of the shipped state machines, breadth first.

A history is a sequence of steps. A step delivers, loses, duplicates or reorders a message; begins or lands a write;
ends or fails a scatter; makes an engine's call; pauses, resumes, closes, kills, freezes, replaces, proves dead or
restarts an agent; or lets time pass. `flow` defines a state, `space` and `lives` define the possible steps, `search`
walks them, and `words` describes them; `witness` is the oracle that checks every byte, `machines` runs the shipped
machines, `frozen` stores them, and `canonical` decides whether two states are equal.

**Speed.** A machine is a function of its state and one event. Its states are numbered, and each (state, event) is
computed once and looked up afterwards; the same holds for the oracle. A state of the world is a tuple of small numbers.
This does not change what is explored: each result was computed by the shipped code.

**Abstractions.**

- *Time does not advance; every period is zero.* Everything that waits for time (a resend, a revoke, a heartbeat) is due
at
  each Tick. Time passes when nothing else can happen, any number of times; a budget of early ticks lets it pass at one
  agent before the other steps are done, so that resends race with the messages they repeat. A timer that fires later
  than a Tick is equivalent to one that fires at a later Tick.
- *Silence has four ages*: heard recently, longer ago than the lease for posting allows, suspect, lost. Each quiet round
of
  time increases by one the age of every peer that is paused, gone, or not sending to an agent; any message resets it.
  Several periods of one age would change nothing, because all timers are due in each.
- *Deadlines of rooms never pass and tombstones never expire.* A deadline fails a room as an abort does, which is
explored,
  and would hide a room that hangs.
- *A message that is in flight is not sent again*: two identical messages are equivalent to a duplicated one. A
heartbeat
  that contains nothing new for its receiver is not sent. Both are losses, which are allowed; the next Tick repeats
  them.
- *Failures have one text.* Machines only check whether a failure exists.
- *An engine makes all calls of one forward at once.* Calls of different rooms and agents are made in any order.
- *Messages between two agents arrive in order* (ZeroMQ over one connection), and so do tags and a worker's parts,
except
  for a budget of reorderings.

Budgets limit the faults of one history (losses, copies, reorderings, early ticks, aborts, pauses, kills, freezes),
never the length or the order of the other steps. **Safety**: the oracle accepts every step. **Liveness**: from every
state there is a path without further faults to a state in which every room has ended and nothing is held.
"""
