# Every target sets up .venv by itself; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TENSORFLOW := $(VENV)/.tensorflow
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

# weft starts processes by the command `python`; let it be the one of .venv.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo test test-long test-tensorflow test-integrations test-versions seeded fuzz fuzz-files faults random-faults restarts check bench
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(READY)  ## train a small GPT, split over two processes, for about two minutes
	weft run -n 2 examples/gpt_demo.py $(ARGS)

SUITE := $(BIN)/python -m tests.suite

test: $(TENSORFLOW)  ## run most of the tests; ROOM=torch/split, CHANGED=1 or ARGS="tests/unit -k mesh" for some
	$(SUITE) $(if $(ROOM),--room $(ROOM)) $(if $(CHANGED),--changed $(filter-out 1,$(CHANGED))) -- $(ARGS)

test-long: $(TENSORFLOW)  ## run what `make test` leaves out: long tests, and most of each long list of alike cases
	$(SUITE) --long -- $(ARGS)

test-tensorflow: $(TENSORFLOW)  ## all tests of TensorFlow
	$(SUITE) --only tensorflow -- $(ARGS)

test-integrations: $(TENSORFLOW)  ## run most of those with trainers of other libraries, and whole scripts for smdistributed
	$(SUITE) --only integrations -- $(ARGS)

seeded: $(TENSORFLOW)  ## put faults into a copy of the source, one a room, and count those that tests catch; takes an hour
	$(BIN)/python -m tests.seeded $(ARGS)

test-versions: $(READY)  ## the tests on PyTorch 2.11 to the newest, with Python 3.10 to 3.13 where they are; takes hours and 25 GB
	$(BIN)/python -m tests.versions $(ARGS)

fuzz: $(READY)  ## run random programs split and in one process until stopped; ARGS=1000 for so many
	$(BIN)/python -m tests.fuzz $(ARGS)

fuzz-files: $(READY)  ## read damaged files, settings and command lines until stopped; ARGS=5000 for so many
	$(BIN)/python -m tests.fuzz_files $(ARGS)

faults: $(READY)  ## every fault at every moment under every launcher; takes an hour; ARGS="--only mpirun" for some
	$(BIN)/python -m tests.fault.matrix $(ARGS)

random-faults: $(READY)  ## strike small jobs with signals at random moments until stopped; ARGS=200 for so many
	$(BIN)/python -m tests.fault.campaign $(ARGS)

restarts: $(READY)  ## 200 restarts at random moments end with the weights of a run without any
	$(BIN)/python -m tests.fault.restarts_battery $(ARGS)

check: $(READY)  ## lint, formatting, types, spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell

bench: $(TENSORFLOW)  ## run the benchmarks; each one's README explains its table
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.schedules
	$(BIN)/python -m benchmarks.balance
	$(BIN)/python -m benchmarks.tensor_parallel
	$(BIN)/python -m benchmarks.experts
	$(BIN)/python -m benchmarks.generation
	$(BIN)/python -m benchmarks.simulator
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.tensorflow
	$(BIN)/python -m benchmarks.data_parallel --ranks 2
	$(BIN)/python -m benchmarks.data_parallel --ranks 4
	$(BIN)/python -m benchmarks.all_reduce
	$(BIN)/python -m benchmarks.sends
	$(BIN)/python -m benchmarks.lengths
	$(BIN)/python -m benchmarks.slow_network
	$(BIN)/python -m benchmarks.loss_parity
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.recording

# torch first and pinned: left to the rest it may come as another, larger build.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(PIP) install -c constraints.txt -e ".[dev]"
	touch $@

# Not through pyproject.toml: `tensorflow` there is a larger wheel than `tensorflow-cpu`, and tf_keras asks for it.
$(TENSORFLOW): $(READY)
	$(PIP) install -c constraints.txt tensorflow-cpu
	$(PIP) install -c constraints.txt --no-deps tf_keras
	touch $@
