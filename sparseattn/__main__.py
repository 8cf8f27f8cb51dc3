"""`python -m sparseattn` is the console command `sparseattn`."""

from sparseattn.cli.app import app

app(prog_name="sparseattn")
