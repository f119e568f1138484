"""What panels show besides tables, as styled lines: pure functions of data and a width."""
