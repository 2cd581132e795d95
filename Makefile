# Everything a fresh clone needs: `make demo` and `make test` build the environment by themselves.
#
#   make install    create .venv and install the package with its development tools
#   make demo       the main job on CPU with two processes
#   make test       the tests that need no GPU and little time
#   make test-slow  the others: each family of models, trainers, jobs, memory, the planner, faults
#   make test-all   both in one session, the longest first, as continuous integration runs them
#   make test-grid  every trainer over every number of ranks, family and accumulation, and rows that
#                   begin alike in every way (long)
#   make test-families  every family through the recipe on two processes, beside one (long)
#   make test-fault-grid  every fault at every place in every rank, on 2 and 4 processes (long)
#   make oldest     create .venv-oldest, with the oldest transformers supported
#   make test-oldest  exactness with the oldest transformers supported, in .venv-oldest
#   make test-gpu   the tests that need one
#   make planted-faults  put wrong code into each of fourteen rooms: a test of the room has to notice it
#   make real-model MODEL=folder  a pretrained model over two processes against one, and its scores
#                                 against greedy decoding: before a release
#   make pictures   draw each picture of docs/schedules again
#   make docs       write the generated pages of docs/reference
#   make site       build the site of README and docs/ in build/site; it must have no broken link
#   make models     write docs/reference/models.md, which takes ten minutes
#   make notebook   run the notebook of examples/ and write what its cells show
#   make wheel      the source archive and the wheel of a release, in dist/
#   make check      formatting, lint, types, layers, generated pages
#   make style      of these formatting, lint and types, which no test looks at
#   make clean      remove build output and caches (remove .venv by hand to start over)
#
# PYTHON=python3.12 chooses the interpreter, TORCH='torch==2.12.0' another build of torch.

PYTHON ?= python3
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE_STAMP := $(VENV)/.site
# Not tests/trainer/test_checkpoints.py: 5.17 can't resume on several CPU processes, with any model.
OLDEST := transformers==5.17.0
OLDEST_VENV := .venv-oldest
OLDEST_TESTS := tests/hf/test_patching.py tests/families/test_checks.py \
    tests/families/test_text_part.py tests/hf/test_latent_attention.py \
    tests/hf/test_exact_families.py tests/hf/call/test_mixers.py \
    tests/trainer/test_exactness.py \
    tests/recipes/test_finetune.py::test_a_resumed_run_repeats_the_whole_one_to_the_last_bit \
    tests/trl/test_trainers.py::test_two_ranks_train_as_one_process
# Apart from the rest for their time: every family of models, runs under transformers' and TRL's
# trainers, jobs of several processes under a launcher, memory, the planner, and faults.
SLOW_TESTS := tests/families tests/hf/call tests/hf/test_states_and_latents.py \
    tests/hf/test_exact_families.py tests/hf/test_masked_models.py tests/hf/test_images.py \
    tests/hf/test_rows.py tests/hf/test_token_log_probs.py tests/prefixes tests/verification/test_shrink.py \
    tests/trainer tests/trl tests/recipes/test_trl_recipes.py \
    tests/recipes/test_trl_refusals.py tests/recipes/test_trl_memory.py \
    tests/recipes/test_model_card.py tests/recipes/test_sharded_reading.py \
    tests/recipes/test_other_worlds.py \
    tests/recipes/test_several_nodes.py tests/recipes/test_launch.py \
    tests/recipes/test_ended.py tests/recipes/test_text_model.py tests/recipes/test_examples.py \
    tests/checkpoints tests/recipes/test_resume.py tests/recipes/test_damage.py \
    tests/recipes/test_signals.py tests/recipes/test_bad_steps.py tests/cli/test_train.py \
    \
    tests/plugin/test_yaml.py tests/docs/test_notebook.py \
    tests/test_installed.py tests/memory tests/hf/test_preflight.py tests/hf/test_preflight_host.py \
    tests/recipes/test_memory_report.py tests/planner tests/cli/test_plan.py \
    tests/faults
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# Workers take work from each other at the end. A third one has the two cores while tests of the
# others wait for their processes.
WORKERS := -n 3 --dist worksteal
SHARED := -m "not gpu" $(WORKERS)
# Of the code as it is written.
CODE_TESTS := tests/test_layering.py tests/docs/test_reference.py::test_reference_is_what_the_code_says
CPU_TORCH := torch==2.13.0+cpu
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu
# What mypy sees: folders under the names that they are installed as, or it would take whatever is
# imported from longctx_patch.cli and longctx_patch.recipes for Any.
TYPED := build/typed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-slow test-all oldest test-grid test-families test-fault-grid test-oldest test-gpu real-model planted-faults pictures docs models notebook wheel check style clean

install: $(STAMP)

$(STAMP): setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is $$($(PYTHON) --version 2>&1): longctx-patch needs Python 3.11 or newer." \
	         "Choose one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# --no-compile: Python compiles the quarter of all modules that is imported, when it is.
	@BIN=$(BIN) TORCH="$(TORCH)" CPU_TORCH=$(CPU_TORCH) CPU_TORCH_INDEX=$(CPU_TORCH_INDEX); \
	if [ -n "$$TORCH" ]; then \
	    echo "torch: $$TORCH, as asked"; \
	    $$BIN/python -m pip install --no-compile "$$TORCH"; \
	elif nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	    echo "torch: an NVIDIA GPU is here, so the ordinary build"; \
	elif [ "$$(uname -s)" != Linux ]; then \
	    echo "torch: the ordinary build for $$(uname -s)"; \
	else \
	    echo "torch: no NVIDIA GPU here, so the CPU build $$CPU_TORCH (no CUDA to download)"; \
	    : "--no-deps: only torch itself is looked up at the second index"; \
	    $$BIN/python -m pip install --no-compile --no-deps --retries 1 --timeout 15 \
	        --extra-index-url $$CPU_TORCH_INDEX "$$CPU_TORCH" || { \
	        echo "$$CPU_TORCH could not be had from $$CPU_TORCH_INDEX nor from pip's find-links." \
	             "To take another build: make TORCH='torch>=2.11' $(MAKECMDGOALS)" >&2; exit 1; }; \
	fi
	$(BIN)/python -m pip install --no-compile -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(PYTEST) $(SHARED) $(addprefix --ignore=,$(SLOW_TESTS))

test-slow: $(STAMP)
	$(PYTEST) $(SHARED) $(SLOW_TESTS)

test-all: $(STAMP)
	$(PYTEST) $(SHARED) tests

test-grid: $(STAMP)
	$(PYTEST) tests/prefixes/grid.py tests/trl/grid.py

test-families: $(STAMP)
	$(PYTEST) tests/recipes/families.py

test-fault-grid: $(STAMP)
	$(PYTEST) tests/faults/grid.py

oldest: $(OLDEST_VENV)/.installed

test-oldest: oldest
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -q $(WORKERS) $(OLDEST_TESTS)

# It takes everything but transformers from the other environment.
$(OLDEST_VENV)/.installed: $(STAMP)
	$(PYTHON) -m venv $(OLDEST_VENV)
	@others=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	    own=$$($(OLDEST_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	    echo "import site; site.addsitedir('$$others')" > $$own/others.pth
	$(OLDEST_VENV)/bin/python -m pip install --no-compile '$(OLDEST)'
	@touch $@

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu

real-model: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/real_model.py $(MODEL)
	PYTHONPATH=. $(BIN)/python tests/evaluation/forced_and_greedy.py $(MODEL)

planted-faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/planted_faults.py

pictures: $(STAMP)
	@for picture in docs/schedules/*.png; do \
	    name=$$(basename $$picture .png); plan=$${name%_*}; more=; \
	    case $$name in \
	        double_ring*) more="--ranks-per-node 4";; \
	        branches*) plan=auto more="--seq-len 64K --branches 4x8K";; \
	    esac; \
	    $(BIN)/longctx schedule --plan $$plan --direction $${name##*_} --ranks 8 $$more \
	        --out $$picture > /dev/null || exit 1; \
	done

docs: $(STAMP)
	$(BIN)/python docs/make_reference.py

# Not --quiet, under which --strict sees no warning.
site: $(SITE_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'build/site/index.html; its search needs a server: python3 -m http.server -d build/site'

$(SITE_STAMP): $(STAMP)
	$(BIN)/python -m pip install --no-compile -e ".[site]"
	@touch $@

models: $(STAMP)
	$(BIN)/python -m docs.make_models

notebook: $(STAMP)
	$(BIN)/python -m docs.make_notebook

wheel: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

check: style
	$(BIN)/python -m pytest -q $(CODE_TESTS)

style: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/longctx_patch
	@ln -s $(CURDIR)/longctx_patch/* $(CURDIR)/cli $(CURDIR)/recipes $(TYPED)/longctx_patch/
	@ln -s $(CURDIR)/examples $(CURDIR)/benchmarks $(CURDIR)/docs $(CURDIR)/tests \
	    $(CURDIR)/pyproject.toml $(TYPED)/
	cd $(TYPED) && $(CURDIR)/$(BIN)/mypy --cache-dir $(CURDIR)/build/mypy \
	    longctx_patch examples benchmarks docs tests

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
