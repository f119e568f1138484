"""The agent-to-agent protocol as machines that do no I/O.

`messages` and `codec` say what travels, `tag` what a landed write carries, `ring` and `gate` who may write where,
`peer` and `sessions` who is alive; `prefill` and `decode` compose them, around a `context` that their parts share:
events go in, actions come out, `runtime/` performs them.
"""

from __future__ import annotations
