"""What methods are compared with: everything, a window, chance, and the oracle of pages."""
