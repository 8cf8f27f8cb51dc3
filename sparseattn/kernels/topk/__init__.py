"""The best rows or pages by their scores."""
