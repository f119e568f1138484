"""`kvctl top`: live view of a fleet in a terminal.

Data flows in one direction: `feed` reads the agents or a recording on its own thread, `store` keeps the answers, and
`panels` show them. `store`, `table_specs` and `drawing` do not depend on textual; widgets do no I/O.
"""
