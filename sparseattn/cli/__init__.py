"""The console command `sparseattn`. It may use everything.

A command is a module here with a dataclass of its options and a function `run` of that, and a line in `app.COMMANDS`,
which imports it when it is called. Options that commands share are in `options.py`, their texts as values in
`values.py`; `command.py` makes both a console command.
"""
