"""Scores of pages from directions in which a page's keys vary (Ellipsoid, Quad, CLSE)."""
