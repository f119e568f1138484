"""Known failures in the logs of engines: the table of `signatures`, and `scan`, which searches files for them."""
