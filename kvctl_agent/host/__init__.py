"""I/O on this host that agents and the command line share: sysfs and /proc, name resolution, sockets, key files.

Uses the standard library only, as the contract.
"""
