"""One panel per view and per drill-down: which questions it needs answered, and how the store's answers are shown."""
