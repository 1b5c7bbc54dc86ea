# Everything runs in .venv. The .*-installed stamps avoid a new installation until pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ADAPTER := packages/dataplane-transfer-queue

.PHONY: chaos quick coverage fuzz soak surface sync example-grpo example-multimodal bench bench-links bench-memory bench-compare bench-transports links-packages system-packages test-packages simulate test test-compare test-deploy test-frameworks test-gpu test-nixl test-ray test-verl test-wheels testbed check docs clean

bench: links-packages $(VENV)/.bench-installed
	$(BIN)/python -m bench headline --json bench/out/report.json

# The longer table: 2, 4 and 8 hosts, three traces, with and without dedup; about half an hour.
bench-links: links-packages $(VENV)/.bench-installed
	$(BIN)/python -m bench links --json bench/out/links.json

bench-memory: $(VENV)/.bench-installed
	$(BIN)/python -m bench run --trace video --planes dataplane,controller --dedup both --link none --hosts 2 --prompts 16 --memory-limit 3GiB --json bench/out/limited.json
	$(BIN)/python -m bench memory --prompts 4,8,16 --json bench/out/memory.json

# Debian packages, installed if they are missing and this user may install them: python3-venv, if there is no
# environment yet; `ip` and `tc`, for hosts with their own links; a browser, in which tests open the bench's report;
# etcd, for rosters.
PACKAGES := deploy/system_packages.sh
VENV_PACKAGE := $(if $(wildcard $(BIN)/python),,$(notdir $(PYTHON))-venv)
links-packages:
	@$(PACKAGES) $(VENV_PACKAGE) iproute2
test-packages:
	@$(PACKAGES) $(VENV_PACKAGE) iproute2 etcd-server chromium
# The same, if sudo needs to ask for a password.
system-packages:
	@$(PACKAGES) --ask $(VENV_PACKAGE) iproute2 etcd-server chromium

# Train a small transformer with GRPO in seven processes; see examples/grpo_tiny. Options: GRPO="--lag 2 --kill train".
example-grpo: $(VENV)/.examples-installed
	$(BIN)/python examples/grpo_tiny/run.py $(GRPO)

# Move photographs, processed for a vision model, from one host to a reader on another.
example-multimodal: $(VENV)/.examples-installed
	$(BIN)/python examples/multimodal/run.py

bench-transports: $(VENV)/.bench-installed $(VENV)/.engines-installed
	PYTHONPATH=$(ENGINES) $(BIN)/python -m bench perf --only transports --rounds 9 --json bench/out/transports.json

# Compare with other planes: one batch, Ray's object store, and the headline, which includes TransferQueue if installed.
bench-compare: links-packages $(VENV)/.compare-installed
	$(BIN)/python -m bench compare --json bench/out/compare.json
	$(BIN)/python -m bench run --trace math,video --planes dataplane,ray-store --dedup off --hosts 4 --prompts 4 --steps 4 --timeout 600 --json bench/out/compare-ray.json
	$(BIN)/python -m bench headline --json bench/out/compare-headline.json

# Most tests wait for processes, so two cores serve four workers. tests/conftest.py starts the longest files first.
# The tests start hundreds of processes, so a failed test is repeated once, and the summary names it. A test that needed
# its second try twice in five runs is mended, or listed in tests/flakes.toml with its reason.
TEST_WORKERS ?= 4
test: test-packages $(VENV)/.test-installed
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --reruns 1

# Tests that start no peers and need neither torch, a browser nor Debian packages: two minutes with the installation.
# They run in a second environment, so that they cannot use those by accident.
QUICK := $(VENV)/quick
QUICK_TESTS := tests/metadata tests/peer tests/memory tests/twin tests/client tests/protocol tests/launch \
  $(patsubst %,tests/packaging/test_%.py,flakes phrases quick rooms) $(patsubst %,tests/bench/test_%.py,columns headline ledger traces)
QUICK_LEFT_OUT := tests/protocol/test_value_vectors.py tests/protocol/test_raw_peer.py \
  $(patsubst %,tests/launch/test_%.py,cli embedded rundir runs)
quick: $(QUICK)/.installed
	$(QUICK)/bin/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile $(addprefix --ignore=,$(QUICK_LEFT_OUT)) $(QUICK_TESTS)

$(QUICK)/.installed: $(BIN)/python pyproject.toml
	$(PYTHON) -m venv $(QUICK)
	$(QUICK)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[quick]'
	touch $@

coverage: test-packages $(VENV)/.test-installed
	$(BIN)/coverage run -m pytest --reruns 1
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report

# Hosts as network namespaces on this machine: links that are cut, and torchrun.
testbed: links-packages $(VENV)/.test-installed
	$(BIN)/python -m deploy.testbed --json bench/out/testbed.json

SEEDS ?= 2000
JOBS ?= $(shell nproc)
simulate: $(VENV)/.test-installed
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS)

# Random sequences of calls, compared with a model, on one real peer and on three.
SURFACE_EXAMPLES ?= 200
surface: $(VENV)/.test-installed
	SURFACE_EXAMPLES=$(SURFACE_EXAMPLES) $(BIN)/python -m pytest -q tests/end_to_end/test_surface_model.py

SOAK_MINUTES ?= 10
soak: $(VENV)/.bench-installed
	$(BIN)/python -m tests.faults.soak --minutes $(SOAK_MINUTES) --json bench/out/soak.json

# Every kind of damage at every moment on real processes, and every cause of a slow step. Some cases need CAP_NET_ADMIN.
chaos: test-packages $(VENV)/.test-installed
	CHAOS=1 $(BIN)/python -m pytest -q tests/chaos tests/end_to_end/test_chaos_calls.py tests/timeline/test_planted.py

# Coverage-guided fuzzing, FUZZ_SECONDS for each decoder. Inputs that reached new code are kept in .fuzz.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= local peers bulk journal objects columns filters manifest traces
fuzz: $(VENV)/.fuzz-installed
	for target in $(FUZZ_TARGETS); do $(BIN)/python -m tests.fuzz $$target $(FUZZ_SECONDS) || exit 1; done

# Tests that need the planes that the bench compares with; `make test` skips them if those are not installed. To run a
# part: COMPARE=ray-store or COMPARE=transfer_queue.
COMPARE ?=
test-compare: $(VENV)/.test-installed $(VENV)/.compare-installed
	$(BIN)/python -m pytest -q -m compare -k '$(COMPARE)' tests/bench tests/perf tests/integrations

test-deploy: $(VENV)/.deploy-installed $(BIN)/promtool
	$(BIN)/python -m pytest -q --reruns 1 tests/deploy/test_container.py tests/deploy/test_kubernetes.py tests/deploy/test_monitoring.py

# Take only promtool from Debian's prometheus package; nothing is installed or started.
$(BIN)/promtool: $(BIN)/python
	mkdir -p $(VENV)/debian && cd $(VENV)/debian && apt-get download --quiet prometheus
	dpkg-deb --extract $(VENV)/debian/prometheus_*.deb $(VENV)/debian
	mv $(VENV)/debian/usr/bin/promtool $@ && rm -r $(VENV)/debian

# NIXL is in its own directory: otherwise the peers of all other tests would use it.
ENGINES := $(VENV)/engines
test-nixl: $(VENV)/.engines-installed
	PYTHONPATH=$(ENGINES) $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile --max-worker-restart 0 --reruns 2 tests/engines

$(VENV)/.engines-installed: $(VENV)/.test-installed
	rm -rf $(ENGINES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(ENGINES) 'nixl-cu13>=1.5,<2'
	touch $@

# Uses $(PYTHON) as it is, because a machine with a GPU may have no network; see tests/gpu/README.md.
test-gpu:
	$(PYTHON) -m pytest -rs -m gpu tests/gpu

# Real raylets on this machine; about a minute. The other tests do not use what this installs.
test-ray: $(VENV)/.test-installed $(VENV)/.ray-installed
	$(BIN)/python -m pytest -q --reruns 1 tests/integrations/test_ray.py tests/docs -k 'ray or docs/run.md'

# The real verl, without its GPU dependencies. Ray gives its own processes 30 s to start, which a busy machine exceeds,
# so a failed test is repeated once. verl's wheel contains its tests, as a package `tests`.
VERL := $(VENV)/verl
test-verl: $(VENV)/.test-installed $(VERL)/.installed
	$(BIN)/python -m pytest -q --reruns 1 tests/integrations/test_verl.py tests/docs/test_pages.py -k 'verl'

$(VERL)/.installed: $(BIN)/python pyproject.toml
	$(PYTHON) -m venv --clear $(VERL)
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[compare]' --editable $(ADAPTER) 'transformers<5' \
	  accelerate cachetools codetiming datasets dill fastapi orjson pandas peft pylatexenc pytest pytest-asyncio \
	  tensorboard torchdata uvicorn
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	mkdir $(VERL)/own && mv $(VERL)/lib/python*/site-packages/tests $(VERL)/own
	touch $@

# The real TRL and OpenRLHF, and TransferQueue's own tests, also without GPU dependencies.
FRAMEWORKS := $(VENV)/frameworks
test-frameworks: $(VENV)/.test-installed $(FRAMEWORKS)/.installed
	$(BIN)/python -m pytest -q --reruns 1 tests/integrations/test_frameworks.py tests/integrations/test_transfer_queues_own.py

$(FRAMEWORKS)/.installed: $(BIN)/python pyproject.toml
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[ray]' --editable $(ADAPTER) \
	  torch==2.13.0 tensordict==0.15.3 transformers==5.15.0 trl==1.16.0 \
	  aiohttp einops jsonlines loralib peft pylatexenc pytest pytest-asyncio pytest-mock tensorboard torchdata torchmetrics
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps openrlhf==0.11.2
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(FRAMEWORKS)/transfer-queue TransferQueue==0.1.11
	touch $@

# Build and check all distributions, and install them into an empty environment.
test-wheels: $(VENV)/.wheels-installed
	$(BIN)/python -m pytest -q tests/packaging

# Build the documentation as a site in build/site; fails on a broken link or reference. Not with --quiet: mkdocs does
# not count the warnings that it hides, so --strict passes.
docs: $(VENV)/.docs-installed
	$(BIN)/python docs/.site/gather.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(VENV)/.test-installed
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy

# Generates the blocking client, dataplane/client/_sync, from dataplane/client/_async.
sync: $(VENV)/.test-installed
	$(BIN)/python -m tests.client.make_sync

clean:
	rm -rf $(VENV) bench/out .coverage .coverage.*

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("dataplane needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV) || { rm -f $(BIN)/python*; exit 1; }  # or the next make would use an incomplete environment

# The adapter for TransferQueue is a separate distribution.
$(VENV)/.test-installed: BESIDE := --editable $(ADAPTER)
$(VENV)/.test-installed: $(ADAPTER)/pyproject.toml

# Compile ahead, because a run starts dozens of processes and some machines do not store bytecode.
$(VENV)/.%-installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]' $(BESIDE)
	$(BIN)/python -m compileall -q dataplane bench
	touch $@
