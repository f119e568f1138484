"""Fault injection into a running agent: its control channel, its transfer engine, its clock.

`specification` has the kinds of faults and their syntax; `injector` holds the faults in force; `agent` builds an agent
with fault-injecting parts; `batch_faults` applies faults to one run of a bench. Importing the package alone imports
nothing of the agent, because `kvctl bench --help` reads the specification.
"""
