"""Everything that starts worker processes on this machine; the only part of kvctl that imports kvctl_agent."""
