"""Drives SGLang's own disaggregation classes without an engine, in rank processes, on any transfer backend.

A `Case` describes a prefill and a decode server, `Room`s are moved between them with SGLang's own queues, and every
byte on decode is compared:

    with PDPair(Case(backend="nixl", prefill=Ranks(tp=2))) as pair:
        pair.transfer([Room(1, tokens=200), Room(2, tokens=96, chunks=(32,))]).check()
"""
