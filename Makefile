# Every target does its own set-up, once: a virtual environment in $(VENV) with the pinned, hashed requirements.
#   make train ARGS="--arch vit"      train on every visible device
#   make test | slow | lint           the fast tests (minutes) | the slow ones | ruff and pyright
#   make browser                      the pages, opened in headless Chromium
#   make reference                    write docs/reference.md, the table of all flags, anew
#   make soak                         200 random kills of one run, and 15 minutes of memory: most of an hour
#   make audit                        look for known vulnerabilities in everything that requirements/*.txt pin
#   make lock                         resolve requirements/*.txt anew from pyproject.toml
#   make wheel                        build dist/cssm-*.whl
# PYTHON=python3.12 and VENV=folder choose another interpreter and another environment.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
RUN := $(VENV)/bin/python
MINOR := import sys; print("%d.%d" % sys.version_info[:2])
VERSION := $(shell $(PYTHON) -c '$(MINOR)')

# What `make train` installs follows the NVIDIA driver: CUDA 13 needs 580 or newer, CUDA 12 needs 525.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/\..*//p')
RUNTIME := $(shell [ "$(DRIVER)" -ge 580 ] 2>/dev/null && echo gpu || { [ "$(DRIVER)" -ge 525 ] 2>/dev/null && echo cuda12 || echo runtime; })

.PHONY: help train test slow browser reference soak audit lint lock wheel
.DELETE_ON_ERROR:

help:
	@sed -n '2,10s/^# *//p' Makefile

train: $(VENV)/.$(RUNTIME)-$(VERSION)
	$(RUN) main.py $(ARGS)

test: $(VENV)/.dev-$(VERSION)
	$(RUN) -m pytest -q -m "not slow and not browser" -n auto --maxprocesses 8 --dist loadfile $(ARGS)

slow: $(VENV)/.dev-$(VERSION)
	$(RUN) -m pytest -q -m slow -n auto --maxprocesses 8 $(ARGS) || [ $$? -eq 5 ]  # 5: no test has the marker

browser: $(VENV)/.dev-$(VERSION)
	$(RUN) -m pytest -q -m browser $(ARGS)

reference: $(VENV)/.dev-$(VERSION)
	$(RUN) -m cssm.reference >docs/reference.md

KILLS ?= 200
MINUTES ?= 15
soak: $(VENV)/.dev-$(VERSION)
	$(RUN) tests/faults/soak.py kills $(KILLS)
	$(RUN) tests/faults/soak.py memory $(MINUTES)

audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip --disable-pip-version-check install -q pip-audit
	for file in runtime dev gpu cuda12; do \
	  .venv-audit/bin/pip-audit --strict --disable-pip --require-hashes -r requirements/$$file.txt || exit 1; done

lint: $(VENV)/.dev-$(VERSION)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m pyright --pythonpath $(RUN)

# requirements/X.txt is complete, so that pip has nothing to resolve; bytecode is written at first import.
$(VENV)/.%-$(VERSION): requirements/%.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "error: $(PYTHON) is Python $(VERSION), 3.11 or newer is needed: type PYTHON=python3.12 behind make")'
	@[ "$$($(RUN) -c 'import pip; $(MINOR)' 2>/dev/null)" = "$(VERSION)" ] || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing $< (about 1 GB, once)"
	@$(RUN) -m pip --disable-pip-version-check install -q --require-hashes --no-deps --no-compile -r $<
	@touch $@

COMPILE = .venv-lock/bin/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
  --no-emit-index-url --custom-compile-command "make lock" pyproject.toml

lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip --disable-pip-version-check install -q uv
	$(COMPILE) -o requirements/runtime.txt
	for extra in dev gpu cuda12; do \
	  $(COMPILE) --extra $$extra -c requirements/runtime.txt -o requirements/$$extra.txt || exit 1; done

wheel:
	$(PYTHON) -m pip --disable-pip-version-check wheel -q --no-deps -w dist .
