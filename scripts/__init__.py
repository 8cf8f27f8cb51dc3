"""Tools of the repository that the package does not need."""
