"""Keys quantized to few bits: encoding them, logits of rows and scores of pages from their codes."""
