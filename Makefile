# The few commands a newcomer needs. The work is done by scripts/ and CMakePresets.json.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long bench bench-peers format lint clean

help: ## show this list
	@echo "cutloss: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Settings: PYTHON=python3.12 (3.11 or newer), JOBS=2 (default: one per core)."
	@echo "After 'make setup' the tool is .venv/bin/cutloss; C++ alone: cmake --preset dev && cmake --build --preset dev"

setup: ## install what is missing, build, and put the package and the tool into .venv
	@scripts/setup.sh

demo: setup ## fine-tune a small model with the loss on and off, and compare
	@.venv/bin/cutloss-demo

test: setup ## build and run all short tests, C++ and Python (under 15 minutes on 2 cores)
	@scripts/test.sh short

test-long: setup ## the same and the long ones: random problems, sanitizers, fuzzing, installed package, TPU compiles
	@scripts/test.sh long

bench: setup ## time the kernels and, beside its peers, the whole loss; ARGS=--quick, ARGS=--help
	@scripts/bench.sh $(ARGS)

bench-peers: setup ## install the peers that bench compares with into build/peers (5 GB)
	@scripts/bench-peers.sh

format: ## format C++ and Python in place
	@scripts/format.sh

lint: ## clang-tidy and ruff, changing nothing
	@scripts/lint.sh

clean: ## remove build/; the environment in .venv stays
	rm -rf build
