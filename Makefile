# Two commands do everything: `make demo` installs and runs the benchmark on the built-in reference model, `make test`
# installs and runs all checks. Both make .venv if it is not there.
.PHONY: demo test lint clean

demo: .venv/demo
	.venv/bin/sparseattn bench --out bench

test: .venv/dev lint
	.venv/bin/python -m pytest

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

.venv/demo: pyproject.toml scripts/venv
	scripts/venv transformers,plots
	@touch $@

.venv/dev: pyproject.toml scripts/venv
	scripts/venv dev
	@touch $@

clean:
	rm -rf .venv bench
