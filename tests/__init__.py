"""The tests, in folders as the package's; `cases.py` lists the methods that every law is tried on."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
