"""`python -m sparseattn` is the console command `sparseattn`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the console command; Ctrl-C ends in one line, even before the command line is read."""
    try:
        from sparseattn.cli.app import app

        app(prog_name="sparseattn")
    except KeyboardInterrupt:
        print("sparseattn: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
