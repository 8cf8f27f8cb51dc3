"""Bridges to other libraries, imported when one of their functions runs and never by `import sparseattn`."""
