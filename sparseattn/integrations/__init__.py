"""Bridges to other libraries; each is imported by its own file alone and none by `import sparseattn`."""
