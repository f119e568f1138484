"""`kvctl top`: live view of a fleet in a terminal.

Data flows in one direction: `feed` reads a source on its own thread, `store` keeps the answers, `panels` show them.
`store`, `table_specs` and `drawing` are independent of textual; widgets do no I/O.
"""
