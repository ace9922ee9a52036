# coreward: everything a person types. Each target installs what it is missing (scripts/install).

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
LAB := $(TARGET)/debug/coreward-lab
DIST := $(TARGET)/dist

FIGURES ?= out/figures

.PHONY: help install build dist deb demo figures screenshot test test-model test-fast test-alone test-all test-nic test-units test-upgrade conformance api-test soak chaos fuzz consistency lint bench clean

help: ## what can be typed
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: ## Debian packages that are missing, by apt-get when root
	@scripts/install build

build: install ## everything, by the development profile that demo and tests use: target/debug
	@PATH="$$HOME/.cargo/bin:$$PATH" $(CARGO) build --workspace --locked

dist: install ## the same, fully optimised, for packages and published figures: target/dist
	@PATH="$$HOME/.cargo/bin:$$PATH" $(CARGO) build --profile dist --locked -p coreward -p coreward-lab

demo: build ## the whole system in namespaces, five policies side by side (DEMO="--seconds 20 ...")
	@scripts/install run
	@$(LAB) demo $(DEMO)

figures: build ## every figure of the papers, simulated, as CSV, SVG and one page: out/figures/index.html
	@$(LAB) figure --all --out $(FIGURES)

test: ## all tests that can run in parallel; names the tests that lack rights
	@scripts/test default $(FILTER)

test-model: ## model, simulator, BPF decisions and fuzzer: what a change of a decision breaks
	@scripts/test model $(FILTER)

test-fast: ## no root, no network namespaces
	@scripts/test fast $(FILTER)

test-alone: ## tests that need the whole machine: demo, chaos, soak, live figures, browser ..
	@scripts/test alone $(FILTER)

test-all: build ## everything: also tests that need the whole machine, a guest with real RSS, the API, upgrades
	@scripts/test all $(FILTER)
	@scripts/test-nic
	@scripts/install deb
	@scripts/test-units
	@scripts/install api
	@scripts/api-test 20
	@scripts/test-upgrade

screenshot: build ## the dashboard in a browser, with a fleet behind it: docs/dashboard.png
	@scripts/install all
	@COREWARD_SCREENSHOT=$(CURDIR)/docs/dashboard.png $(CARGO) test --locked -p coreward-testbed --test alone dashboard::

test-nic: build ## the real agent on a real driver with real RSS, in a QEMU guest
	@scripts/test-nic

test-units: build ## the packages and their units under systemd, in a QEMU guest with Debian
	@scripts/install deb
	@scripts/test-units

test-upgrade: install ## daemons of another layout, or of an older commit (OLD=COMMIT), exchanged for today's and back, under load
	@scripts/install run
	@scripts/test-upgrade $(OLD)

deb: dist ## Debian packages with systemd units, man pages and completions: out/deb/
	@scripts/install deb
	@scripts/deb

conformance: build ## stock clients and servers for minutes while everything changes, with and without SYN cookies
	@scripts/install run
	@$(LAB) testbed conformance
	@$(LAB) testbed conformance --syncookies 2
	@$(LAB) testbed conformance --family 6

api-test: build ## the HTTP API against its OpenAPI document, by schemathesis (EXAMPLES=100)
	@scripts/install api
	@scripts/api-test $(EXAMPLES)

soak: build ## coreward dispatch for minutes while workers die and stop (SOAK="--seconds 300 --seed 1")
	@scripts/install run
	@$(LAB) testbed dispatch-soak $(SOAK)

chaos: build ## faults under load: one controller, then three on etcd with racks, 10 minutes (CHAOS="--seed 2")
	@scripts/install run
	@$(LAB) testbed chaos --seconds 225 --config-changes 500 $(CHAOS)
	@$(LAB) testbed chaos --seconds 225 --config-changes 500 --controllers 3 --racks 2 $(CHAOS)

fuzz: build ## the load balancer's BPF program against its reference model (PACKETS=100000000 or SECONDS=600, SEED=1)
	@$(LAB) fuzz packets $(if $(PACKETS),--packets $(PACKETS)) $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(SEED),--seed $(SEED))

consistency: build ## a million connections while servers, load balancers and keys change (CONSISTENCY="--mode stateful ...")
	@$(LAB) fuzz consistency $(CONSISTENCY)

lint: install ## formatting, clippy, licences
	@scripts/lint

bench: dist ## what a packet, a report and a table cost; writes docs/cost.md
	@scripts/install run
	@$(DIST)/coreward-lab bench all --write docs/cost.md

clean: ## build products
	@$(CARGO) clean
