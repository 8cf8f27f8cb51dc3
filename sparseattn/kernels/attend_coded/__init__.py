"""Single rows chosen by keys of few bits, and attention over them, at once."""
