"""Single rows chosen by keys of few bits or by product codes, and attention over them, at once."""
