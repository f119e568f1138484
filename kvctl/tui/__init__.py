"""`kvctl top`: a fleet live on one terminal.

Data flow in one direction: a `feed` asks a source on its own thread, the `store` keeps what was answered, `panels`
render it. The store and what derives from it (`sheets`, `pictures`) know nothing of textual; widgets do no I/O.
"""
