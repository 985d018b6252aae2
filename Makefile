# Every target makes the virtual environment it needs; a second run finds it ready. ARGS="…" goes to the command behind a target.
#   make demo   the story, then keeps serving          make up     serve without the story
#   make test   everything that runs in minutes        make check  lint, types, import contracts, migrations
#   make soak   the long tests                         make bench  figures, printed and never asserted
#   make sim    the night on the virtual clock         make gpu    what needs a CUDA device
#   make fmt    format the source                      make clean  remove the environment and the demo's data

PYTHON ?= python3
ARGS ?=
WORKERS ?= 3
TORCH_INDEX ?=
EXTRAS := platform,worker,cpu,grammar,demo
# A comma inside an argument of $(call …).
, := ,
RUN := .venv/bin/python
PIP := $(RUN) -m pip install --no-input --disable-pip-version-check --constraint constraints.txt
# pytest ends with 5 where no test carries the marker.
NONE_IS_FINE := { [ $$? -eq 5 ] && echo "No test carries this marker yet."; }
STORY := .venv/.installed-for-demo
ALL := .venv/.installed-for-development

.PHONY: demo up model test soak gpu check fmt bench sim clean
.DELETE_ON_ERROR:

demo: $(STORY) model
	@$(RUN) manage.py demo $(ARGS)

up: $(STORY) model
	@$(RUN) manage.py up $(ARGS)

model: $(STORY)
	@$(RUN) -m gpu_worker.demo_model >/dev/null

sim: $(STORY)
	@$(RUN) -m gpu_worker.simulate --story flood --device h200-8b --seed 1 $(ARGS)

test: $(ALL) model
	@$(RUN) -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder -m "not soak and not gpu" -rs $(ARGS)

soak: $(ALL) model
	@$(RUN) -m pytest -m soak -rs $(ARGS) || $(NONE_IS_FINE)

gpu: $(ALL)
	@$(RUN) -m pytest -m gpu -rs $(ARGS) || $(NONE_IS_FINE)

bench: $(ALL) model
	@for name in scheduler prefix gateway stream batches books engine; do echo "== benchmarks/$$name.py"; $(RUN) -m benchmarks.$$name $(ARGS) || exit 1; done

# An empty DATABASE_URL keeps the two Django checks away from any database.
check: $(ALL)
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@DATABASE_URL= REDIS_URL= $(RUN) manage.py check
	@DATABASE_URL= REDIS_URL= $(RUN) manage.py makemigrations --check --dry-run

fmt: $(ALL)
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

clean:
	rm -rf .venv .rubato .models

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Rubato needs Python 3.11 or newer, and '$(PYTHON)' is not: name another, as in 'make demo PYTHON=python3.12'."; exit 1; }
	@echo "Making the virtual environment in .venv"
	@$(PYTHON) -m venv .venv || \
		{ rm -rf .venv; echo "'$(PYTHON) -m venv' failed: install the venv package of your system (Debian: python3-venv)."; exit 1; }

# $(1): what to install. After a failure the free space tells a full disk from a missing network; pip's own words stand above.
define install
	@echo "Installing $(1), pinned by constraints.txt. The big part is PyTorch: some 200 MB to download as a CPU build, some GB as a"
	@echo "CUDA build, which plain package indexes serve on Linux; TORCH_INDEX=URL takes it from another index."
	@$(if $(TORCH_INDEX),$(PIP) --index-url "$(TORCH_INDEX)" torch &&) $(PIP) --editable ".[$(2)]" || { \
		if [ "$$(df -Pk .venv | awk 'NR == 2 {print $$4}')" -lt 1048576 ]; then \
			echo "The disk is full: the installation needs 3 GB (8 GB with CUDA) under $(CURDIR)."; \
		else \
			echo "The installation failed: no package index can be reached, or it lacks a pinned version (pip's words are above)."; \
		fi; exit 1; }
	@touch $@
endef

$(STORY): .venv/bin/python pyproject.toml constraints.txt
	$(call install,the platform and its demo,$(EXTRAS))

$(ALL): $(STORY)
	$(call install,the development tools,$(EXTRAS)$(,)dev)
