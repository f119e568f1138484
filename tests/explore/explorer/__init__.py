"""Walks every history of a small world of the shipped machines, breadth first.

What happens is a step: a message is delivered, lost, delivered twice or overtaken, a write begins or lands, a scatter
ends or fails, an engine calls, an agent pauses, goes on, leaves, is killed, freezes and is replaced, is proven dead or
starts anew, time passes.
A history is a sequence of steps. `flow` says what a state is, `space` and `lives` which steps it has, `search` walks
them and `words` tells them; `witness` is the oracle that sees every byte, `machines` runs the shipped machines,
`frozen` keeps them, `canonical` says when two states are one.

**Why it is fast.** A machine is a function of its state and one event. So its states are numbered, and what it does is
computed once for each (state, event) and looked up from then on; likewise the oracle. A state of the world is a few
numbers. Nothing of this changes what is explored: each answer was given by the shipped code.

**What is abstracted.**

- *Time stands still; every period is zero.* Whatever waits for time (a resend, a revoke, a heartbeat) is due at each
  Tick. Time passes when nothing else can happen, as often as it likes; a budget of early ticks lets it pass at one
  agent before the rest is done, so that resends race with what they repeat. A timer that fires later than a Tick is
  one that fired at a later Tick.
- *Silence has four ages*: heard lately, longer ago than the lease allows to post, suspect, lost. Each quiet round of
  time ages by one step what an agent knows of a peer that is paused, gone, or does not speak to it; any message makes
  it fresh. Several periods of one age would change nothing, since all timers are due in each.
- *Deadlines of rooms never come and tombstones never expire.* A deadline fails a room as an abort does, which is
  explored, and would hide a room that hangs.
- *A message that is on its way already is not sent again*: two of the same are one that may be copied. A heartbeat
  that would tell its receiver nothing is not sent. Both are losses, which are allowed; the next Tick repeats them.
- *Failures have one text.* Machines ask only whether there is one.
- *An engine makes all calls of one forward at once.* Calls of different rooms and agents come in any order.
- *Messages between two agents come in order* (ZeroMQ over one connection), and so do tags and a worker's parts, but
  for a budget of overtakings.

Budgets bound the faults of one history (losses, copies, overtakings, early ticks, aborts, pauses, kills,
freezes), never the
length or the order of what else happens. **Safety**: the oracle complains about no step. **Liveness**: from every
state there is a way, without any further fault, to one where every room has ended and nothing is held.
"""
