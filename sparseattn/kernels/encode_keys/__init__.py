"""Keys rounded to a few bits: the levels that groups of rows share, and the codes of every row."""
