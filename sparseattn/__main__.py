"""`python -m sparseattn` is the console command `sparseattn`."""

from sparseattn.cli import app

app(prog_name="sparseattn")
