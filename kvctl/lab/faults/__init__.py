"""Fault injection into a running agent: into its control channel, its transfer engine, its arrivals and its clock.

`specification` defines the kinds of faults and their syntax; `injector` stores the faults in force; `agent` builds an
agent from parts that inject faults; `batch_faults` applies faults to one run of a bench. Importing the package itself
imports nothing of the agent, because `kvctl bench --help` needs the specification.
"""
