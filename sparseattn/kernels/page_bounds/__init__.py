"""Quest's scores of pages, from the minimum and maximum of each channel."""
