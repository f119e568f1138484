"""Fault injection into a running agent: its control channel, its transfer engine, its clock.

`specification` has the kinds of faults and their syntax; `injector` holds the faults in force; `agent` builds an agent
under faults from the shipped parts. Importing this package alone imports nothing of the agent, because
`kvctl bench --help` reads the specification.
"""
