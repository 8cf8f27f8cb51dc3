"""What every other folder speaks of: selections, budgets, row buffers, RoPE and what a step costs.

It may use `utils`.
"""
