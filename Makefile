# coreward: everything a person types. Each target installs what it is missing (scripts/install).

CARGO ?= cargo
COREWARD := target/release/coreward
BENCH := target/release/coreward-bench
FUZZ := target/release/coreward-fuzz

FIGURES ?= out/figures

.PHONY: help install build deb demo figures screenshot test test-nic test-upgrade conformity api-test soak chaos fuzz consistency lint bench clean

help: ## what can be typed
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: ## Debian packages that are missing, by apt-get when root
	@scripts/install build

build: install ## everything, optimised
	@PATH="$$HOME/.cargo/bin:$$PATH" $(CARGO) build --release --workspace --locked

demo: build ## the whole system in namespaces, five policies side by side (DEMO="--seconds 20 ...")
	@scripts/install run
	@$(COREWARD) demo $(DEMO)

figures: build ## every figure of the papers, simulated, as CSV, SVG and one page: out/figures/index.html
	@$(COREWARD) figure --all --out $(FIGURES)

test: ## all tests; what needs missing rights is skipped by name
	@scripts/test

screenshot: build ## the dashboard in a browser, with a fleet behind it: docs/dashboard.png
	@scripts/install run
	@COREWARD_SCREENSHOT=$(CURDIR)/docs/dashboard.png $(CARGO) test --release --locked --workspace --test dashboard

test-nic: build ## the real agent on a real driver with real RSS, in a QEMU guest
	@scripts/test-nic

test-upgrade: install ## daemons of another layout, or of an older commit (OLD=COMMIT), exchanged for today's and back, under load
	@scripts/install run
	@scripts/test-upgrade $(OLD)

deb: build ## Debian packages with systemd units, man pages and completions: out/deb/
	@scripts/install deb
	@scripts/deb

conformity: build ## stock clients and servers for minutes while everything changes, with and without SYN cookies
	@scripts/install run
	@$(COREWARD) testbed conformity
	@$(COREWARD) testbed conformity --syncookies 2

api-test: build ## the HTTP API against its OpenAPI document, by schemathesis (EXAMPLES=100)
	@scripts/install api
	@scripts/api-test $(EXAMPLES)

soak: build ## coreward dispatch for minutes while workers die and stop (SOAK="--seconds 300 --seed 1")
	@scripts/install run
	@$(COREWARD) testbed dispatch-soak $(SOAK)

chaos: build ## everything goes wrong while clients go on: one controller, then three on etcd with racks, under 10 minutes (CHAOS="--seed 2")
	@scripts/install run
	@$(COREWARD) testbed chaos --seconds 225 --changes 500 $(CHAOS)
	@$(COREWARD) testbed chaos --seconds 225 --changes 500 --controllers 3 --racks 2 $(CHAOS)

fuzz: build ## the load balancer's BPF program against its twin in Rust (PACKETS=100000000 or SECONDS=600, SEED=1)
	@$(FUZZ) packets $(if $(PACKETS),--packets $(PACKETS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

consistency: build ## a million connections while servers, load balancers and keys change (CONSISTENCY="--mode stateful ...")
	@$(FUZZ) consistency $(CONSISTENCY)

lint: install ## formatting, clippy, licences
	@scripts/lint

bench: build ## what a packet, a report and a table cost; writes docs/cost.md
	@scripts/install run
	@$(BENCH) all --write docs/cost.md

clean: ## build products
	@$(CARGO) clean
