"""`kvctl top`: live view of a fleet in a terminal.

Data flows in one direction: `feed` reads the agents or a recording on its own thread, `store` keeps the answers, and
`panels` show them. `store`, `listings` and `drawing` do not depend on textual; widgets do no I/O.
"""

VIEWS = ("overview", "rooms", "staging", "layers", "peers", "events", "failed", "history")
"""Names of the views, in the order of their keys 1 to 8."""
