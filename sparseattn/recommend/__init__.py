"""Which method and budget each layer of a model should have: measured, chosen and verified."""
