"""Observer: reads the regions of agents, and answers operators and exporters in their place."""
