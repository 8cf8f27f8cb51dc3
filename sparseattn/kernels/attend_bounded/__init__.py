"""Pages chosen by bounds of their keys, and attention over them, at once."""
