"""Methods that score single rows by cheaper keys: of few bits, of few channels, or product codes."""
