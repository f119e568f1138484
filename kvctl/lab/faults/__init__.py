"""Fault injection into a running agent: into its control channel, its transfer engine, its arrivals and its clock.

`specification` defines the kinds of faults and their syntax; `injector` stores the faults in force; `agent` builds an
agent from parts that inject faults. Importing the package itself imports nothing of the agent, because `kvctl demo
--help` needs the specification.
"""
