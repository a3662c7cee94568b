# make check is the first half of what CI runs; docs/TESTING.md says what runs where. The
# linter and govulncheck are pinned here; the plugins of protoc are pinned in api/generate.sh, which alone
# needs them.

GOLANGCI_VERSION := 2.15.0
VULNCHECK_VERSION := 1.9.0
# Without its database of today govulncheck has that of this day.
VULNDB_VERSION := v0.0.0-20261105234957-e22db6528018

# Where go install puts programs, so that each clone on a machine finds it: to compile it
# takes six minutes of a core.
TOOLS := $(or $(shell go env GOBIN),$(shell go env GOPATH)/bin)
LINT  := $(TOOLS)/golangci-lint-$(GOLANGCI_VERSION)
VULNCHECK := $(TOOLS)/govulncheck-$(VULNCHECK_VERSION)

# Two packages at a time: the tests of a storage system need their cores.
TEST_P       ?= 2
# Parallel tests within a package: node's, whose real processes wait most of the time. More
# of them would wait for the processor.
TEST_PARALLEL ?= 3
# Go applies it to each package, however busy the machine is.
TEST_TIMEOUT ?= 25m
FUZZTIME     ?= 10s
FUZZ         ?= .
BENCHTIME    ?= 1s
BENCH        ?= .
SEEDS        ?= 100
SIM_SEEDS    ?= $(SEEDS)
CALLS        ?= 1000
# For flakes: how often, what, and how many cores a load takes beside it.
RUNS         ?= 20
PACKAGES     ?= ./...
LOAD         ?= 1
PARALLEL     ?= 4
# For chaos, chaos-local and lockstep; without it each run chooses a seed and prints it.
SEED         ?=
DURATION     ?= 3m
# The binaries contain the commit, for the load test's reports.
BUILD        := go build -buildvcs=auto

# One set of tags for vet, linters, tests and the nodes that tests start: with another one
# Pebble and all that stands on it is compiled once more. The race detector turns
# Pebble's invariants on anyway.
TAGS         := -tags invariants
# The compiler takes a quarter less of the processor's time when it collects its garbage less
# often, the linters a twelfth. The tests run without it: some measure memory.
COMPILE      := GOGC=400
GO_TEST      := $(COMPILE) go test -exec 'env -u GOGC' $(TAGS) -vet=off -shuffle=on -timeout $(TEST_TIMEOUT) -p $(TEST_P) -parallel $(TEST_PARALLEL)
# RACE=-race has the race detector in what runs without it.
RACE         ?=
# These packages start no goroutine, so the race detector has nothing to find in them.
PURE         := /placement/decide
# Where -short leaves something out, in this module.
LONG          = $(shell git grep -l 'testing\.Short()' -- '*_test.go' ':!conformance' ':!bench' | xargs -n1 dirname | sort -u | sed 's|^|./|')

.PHONY: build release image packages chart console check quick soak test modules flakes long planted-compiles fuzz bench bench-against-etcd bench-against-dragonboat sim stories links placement-sim scale kills elastic tails documents planted chaos chaos-planted chaos-local conformance lockstep storage-suite etcd-tests etcd-files fmt lint generate \
	check-format check-generate check-tidy vulncheck tools clean

build:
	$(BUILD) -o bin/skein ./cmd/skein
	$(BUILD) -o bin/loadtest ./cmd/loadtest

# What is published, for ARCH: binary, Debian package, the image's root, SBOM, checksums. The same commit gives the
# same bytes. image needs docker.
release:
	deploy/release.sh bin/release

image: release
	docker build -t skein:$$(sed -n 's/.*SkeinVersion = "\(.*\)"/\1/p' etcdapi/version.go) bin/release

# Installs nothing: what make release makes is looked at, started in an empty root, and made twice. A tool that is missing leaves its
# test out, here as in chart and console, but in soak it fails.
packages:
	go test -count=1 -timeout 1h -v ./deploy -release

# The Helm chart: helm lints and renders it, and what is rendered runs as processes in namespaces. It compiles helm,
# which takes minutes the first time, and its modules are many: check-tidy leaves them out.
chart: $(LINT)
	cd deploy/helm && go mod tidy -diff
	cd deploy/helm && $(LINT) run
	cd deploy/helm && go test -count=1 -timeout 30m -v . $(ARGS)

# The console in a real browser: Debian's chromium. A picture of each page
# is left below bin/console.
console:
	@mkdir -p bin/console
	cd console/browser && go test $(TAGS) -count=1 -timeout 20m -v -artifacts -outputdir $(CURDIR)/bin/console . $(ARGS)

# While one works: nothing long, no race detector, and go's cache of results, so that only
# packages whose code or imports have changed run again.
quick:
	go test $(TAGS) -short -timeout $(TEST_TIMEOUT) -p $(TEST_P) -parallel $(TEST_PARALLEL) ./...

# Takes hours: run it before a release, and the part that guards the code you have changed. What this machine cannot run fails,
# unless the variable is set to nothing.
soak: export SKEIN_NOTHING_LEFT_OUT ?= 1
soak:
	$(MAKE) planted
	$(MAKE) flakes
	$(MAKE) long RACE=-race
	$(MAKE) modules RACE=-race
	$(MAKE) kills
	$(MAKE) elastic SEEDS=2000
	$(MAKE) tails SEEDS=100
	$(MAKE) sim SEEDS=100
	$(MAKE) links
	$(MAKE) lockstep SEEDS=100
	$(MAKE) placement-sim
	$(MAKE) storage-suite
	$(MAKE) etcd-tests
	$(MAKE) etcd-files
	$(MAKE) packages
	$(MAKE) chart
	$(MAKE) console
	$(MAKE) documents
	$(MAKE) chaos DURATION=1h
	$(MAKE) chaos-local DURATION=30m
	$(MAKE) chaos-planted
	$(MAKE) fuzz FUZZTIME=1m

# lint vets too: go vet would compile and analyse everything once more.
check: check-format lint check-generate check-tidy planted-compiles test

# The race detector takes three to ten times the processor's time. What -short leaves out
# runs in long, and what lint vets is not vetted again. GORACE: a test process need not wait
# for a second at its end, as the detector has it by default. GOFLAGS: what archtest asks of
# the compiler is compiled already.
test: export GORACE := atexit_sleep_ms=0
test:
	$(GO_TEST) -short $$(go list ./... | grep -E '$(PURE)')
	GOFLAGS="$$GOFLAGS -race" $(GO_TEST) -short $$(go list ./... | grep -vE '$(PURE)')

# The modules beside the main one: linted and tested, but for kube-apiserver's storage suite.
# They have their own requirements, which check need not compile.
modules: conformance $(LINT)
	cd conformance && $(COMPILE) $(LINT) run
	cd bench/against-etcd && $(COMPILE) $(LINT) run
	cd bench/against-dragonboat && $(COMPILE) $(LINT) run
	cd deploy/grpcproxy && $(COMPILE) $(LINT) run
	cd console/tools && $(COMPILE) $(LINT) run
	cd console/browser && $(COMPILE) $(LINT) run
	cd bench/against-etcd && $(GO_TEST) .
	cd bench/against-dragonboat && $(GO_TEST) .

# Flaky tests: all packages RUNS times with the race detector, each time in a new order.
# A failure prints its seed and does not end the rest.
flakes:
	@found=''; load=''; trap 'kill $$load 2>/dev/null' EXIT; trap 'exit 1' HUP INT TERM; \
	for core in $$(seq $(LOAD)); do timeout 1d sh -c 'while :; do :; done' & load="$$load $$!"; done; \
	for run in $$(seq $(RUNS)); do \
	  seed=$$(date +%s)$$run; echo "== run $$run of $(RUNS): -shuffle=$$seed"; \
	  $(GO_TEST) -race -short -count=1 -shuffle=$$seed $(PACKAGES) || found="$$found $$run"; \
	done; \
	if [ -n "$$found" ]; then echo "failed in the runs:$$found" >&2; exit 1; fi

# What test leaves out: processes, which have no race detector however their test is built,
# and what is long.
long:
	$(GO_TEST) $(RACE) $(LONG)

# Each fuzz target of the tree for FUZZTIME, one after the other. A finding is kept in its
# testdata, and the others still run. FUZZ=Frame runs only the matching ones. The test of a
# package is linked once for all its targets. Before 1.27 Go sometimes reports the end of
# the time as a failure (golang/go#75804), without a failing input; that is no finding.
fuzz:
	@set -eu; mkdir -p bin/fuzz; log=$(CURDIR)/bin/fuzz/log; found=''; \
	for dir in $$(git ls-files '*_test.go' | grep -v '^bench/\|^conformance/' | xargs grep -l '^func Fuzz' | xargs -r -n1 dirname | sort -u); do \
	  targets=$$(grep -ho '^func Fuzz[A-Za-z0-9_]*' $$dir/*_test.go | sed 's/^func //' | grep -E '$(FUZZ)' | sort -u); \
	  [ -n "$$targets" ] || continue; \
	  binary=$(CURDIR)/bin/fuzz/$$(echo $$dir | tr / -).test; \
	  go test $(TAGS) -c -fuzz . -o $$binary ./$$dir; \
	  cache=$$(go env GOCACHE)/fuzz/$$(go list ./$$dir); \
	  for target in $$targets; do \
	    echo "== $$dir $$target"; \
	    if (cd $$dir && $$binary -test.run '^$$' -test.fuzz "^$$target\$$" -test.fuzztime $(FUZZTIME) -test.fuzzcachedir $$cache) >$$log 2>&1; then cat $$log; \
	    elif grep -A1 '^--- FAIL' $$log | grep -qx ' *context deadline exceeded'; then echo "nothing was found when the time was over: golang/go#75804"; \
	    else found="$$found $$dir/$$target"; cat $$log; fi; \
	  done; \
	done; \
	if [ -n "$$found" ]; then echo "found something:$$found" >&2; exit 1; fi

# Every benchmark of the tree, one package at a time, printed as the tables that
# docs/PERFORMANCE.md explains. bin/bench.txt keeps go test's output for benchstat.
# BENCH='Append|Alone' runs only those.
bench:
	@set -eu; mkdir -p bin; : >bin/bench.txt; \
	for dir in $$(git ls-files '*_test.go' | grep -v '^bench/\|^conformance/' | xargs grep -l '^func Benchmark' | xargs -r -n1 dirname | sort -u); do \
	  echo "== $$dir" >&2; \
	  go test -run '^$$' -bench '$(BENCH)' -benchtime $(BENCHTIME) ./$$dir >>bin/bench.txt || echo "FAIL $$dir" >>bin/bench.txt; \
	done; \
	awk -v cores="$$(nproc)" -v go="$$(go env GOVERSION)" -v commit="$$(git describe --always --dirty)" -f bench/table.awk bin/bench.txt

# Measures of whole clusters, etcd beside Skein; ARGS="latency --pairs 5".
bench-against-etcd:
	cd bench/against-etcd && go run . $(ARGS)

# What a proposal costs in raft groups alone, Dragonboat beside Skein; ARGS="--pairs 1".
bench-against-dragonboat:
	cd bench/against-dragonboat && go run . $(ARGS)

# The simulator over SEEDS seeds of every story, and over a tenth of them with the race
# detector, which takes ten times as long. Each ends with a table of the results.
sim: stories
	SKEIN_SIM_SEEDS=$$((($(SIM_SEEDS) + 9) / 10)) go test -race $(TAGS) -count=1 -timeout 10h -v -run '^TestStories$$' ./sim

# The first half of sim alone: CI takes a few seeds of every story.
stories:
	SKEIN_SIM_SEEDS=$(SIM_SEEDS) go test $(TAGS) -count=1 -timeout 10h -v -run '^TestStories$$' ./sim

# Every link, one way and both, and every two links, of three and of five nodes are broken, with each
# node as the leader of placement.
links:
	SKEIN_LINKS_ALL=1 go test $(TAGS) -count=1 -timeout 1h -run '^TestBrokenLinks$$' ./sim

# The decisions of placement on 5,000 nodes and 1,000,000 ranges. Each story prints its
# time, and the last line the memory.
placement-sim:
	go test -count=1 -timeout 1h -v -run '^TestStories$$' ./placement/decide/simulate -stories testdata/large

# The model of docs/SCALE.md: up to 1,000 nodes ask one sequencer, in virtual time. It writes the tables of
# bench/results/scale.md and the plots of the document.
scale:
	go test -count=1 -timeout 1h -v -run '^TestScaleReport$$' ./placement -scale

# A node is killed at each step of the raft groups' work and around splits and merges, and the
# leader of placement at each of moves, merges and repairs; test takes every few.
kills:
	SKEIN_TEST_STRIDE=1 go test $(TAGS) -count=1 -timeout 30m -v -run '^(TestKillAroundASplit|TestMergeSurvivesLosses)$$' ./shard
	RAFTGROUP_TEST_STRIDE=1 go test $(TAGS) -count=1 -timeout 10m -v -run '^TestKillAtEachStep$$' ./raftgroup
	PLACEMENT_TEST_STRIDE=1 go test $(TAGS) -count=1 -timeout 30m -v -run '^TestLeaderIsKilledAtEachStep$$' ./placement

# The model of ranges that split, merge and change their leader under transactions and leases,
# over SEEDS seeds: a few a second. test runs some of the first.
elastic:
	SKEIN_SIM_SEEDS=$(SEEDS) go test $(TAGS) -count=1 -timeout 10h -run '^TestElasticRanges$$' ./shard

# Recoveries of clusters that lose most nodes while ranges split, merge and move, over SEEDS seeds: some seconds each.
# long runs the first four.
tails:
	SKEIN_SIM_SEEDS=$(SEEDS) go test $(TAGS) -count=1 -timeout 10h -run '^TestTailsWithChanges$$' ./recovery

# The commands of README.md and the documents, as they are written, on a cluster of processes.
documents:
	go test $(TAGS) -count=1 -timeout 1h -v -run '^TestDocumentedCommandsRun$$' ./cmd/skein -documents

# Each mutation: the seed and checker that find it, and the same seeds without it. What runs has bounds of its own.
# ARGS="-run 'TestMutations/fsync_skipped'" looks for one.
planted:
	go test -tags 'invariants planted' -count=1 -timeout 24h -v -run '^TestMutations$$' ./sim $(ARGS)

# Whether the mutations and the tests that look for them still compile.
# go list compiles the tests for their export data, and links nothing.
planted-compiles:
	$(COMPILE) go list -export -test -tags 'invariants planted' ./sim ./chaos >/dev/null

# Five real processes in network namespaces: what is between machines breaks too, two to
# four things at a time, while an operator changes the cluster; judged by the simulator's
# checkers. A run longer than three minutes is several, each with the next seed.
chaos:
	@mkdir -p bin/chaos
	SKEIN_CHAOS_SEED=$(SEED) SKEIN_CHAOS_DURATION=$(DURATION) go test -count=1 -timeout 24h -v \
	  -artifacts -outputdir bin/chaos -run '^TestStorm$$' ./chaos

# Mutations in those processes: what a storm finds, and with which seed.
chaos-planted:
	go test -tags 'invariants planted' -count=1 -timeout 24h -v -run '^TestMutationStorms$$' ./chaos

# Real processes while machines break. A failed run leaves its history and the nodes' logs
# below bin/chaos. Without root it prints what it leaves out.
chaos-local:
	@mkdir -p bin/chaos
	SKEIN_CHAOS_SEED=$(SEED) SKEIN_CHAOS_DURATION=$(DURATION) go test -count=1 -timeout 24h -v \
	  -artifacts -outputdir bin/chaos -run '^TestChaos$$' ./chaos

# The same generated calls to an etcd and to Skein, their stories, and concurrent clients;
# lockstep makes more of the calls. Etcd is not compiled for the race detector: its calls
# come one after the other, and what answers them has it in its own tests.
# CONFORM='. -run Lockstep -v -seed 42 -calls 20000' runs some of it.
CONFORM      ?= ./...
conformance:
	cd conformance && $(GO_TEST) $(RACE) -count=1 -timeout 60m -p 1 $(CONFORM)

# CALLS calls with each of SEEDS seeds, PARALLEL seeds at a time, from SEED on or from a
# random one, and the whole access matrix. A difference fails it, and the end shows the sum of all seeds.
lockstep:
	cd conformance && go test $(RACE) $(TAGS) -count=1 -timeout 24h -v -parallel $(PARALLEL) \
	  -run 'Lockstep|AccessMatrix' -matrix 1 -seed $(or $(SEED),0) -seeds $(SEEDS) -calls $(CALLS) . $(ARGS)

# Files that package etcdfile writes, restored by older etcds too, which are built first.
ETCD_VERSIONS := 3.5.35 3.6.16
etcd-files: $(ETCD_VERSIONS:%=bin/etcd-%/built)
	@mkdir -p bin/etcds && for v in $(ETCD_VERSIONS); do for tool in etcd etcdutl; do cp bin/etcd-$$v/$$tool bin/etcds/$$tool-$${v%.*}; done; done
	cd conformance && go test $(TAGS) -count=1 -timeout 30m -v ./etcdfiles -binaries $(CURDIR)/bin/etcds $(ARGS)

bin/etcd-%/built:
	mkdir -p $(@D)/module
	cd $(@D)/module && rm -f go.mod go.sum && go mod init etcds && go get go.etcd.io/etcd/server/v3@v$* go.etcd.io/etcd/etcdutl/v3@v$*
	cd $(@D)/module && go build -o ../etcd go.etcd.io/etcd/server/v3 && go build -o ../etcdutl go.etcd.io/etcd/etcdutl/v3
	touch $@

# kube-apiserver's own storage suite against Skein (docs/CONFORMANCE.md).
# ARGS='-suite.run ^TestWatch$$ -suite.raw raw.json' runs some of it.
storage-suite: $(LINT)
	cd conformance/apiserver && $(LINT) run
	cd conformance/apiserver && go test $(TAGS) -count=1 -timeout 30m -v . $(ARGS)

# etcd's own tests of users, which start binaries, against Skein (docs/CONFORMANCE.md).
# ARGS='-suite.run TestAuthTxn' runs some of them.
etcd-tests: $(LINT)
	cd conformance/etcdtests && $(LINT) run
	cd conformance/etcdtests && go test $(TAGS) -count=1 -timeout 2h -v . $(ARGS)

fmt: $(LINT)
	$(LINT) fmt
	cd conformance && $(LINT) fmt
	cd conformance/apiserver && $(LINT) fmt
	cd conformance/etcdtests && $(LINT) fmt

# The linters need what the compiler says of the imports: with -race that is what test
# compiles anyway.
lint: $(LINT)
	GOFLAGS="$$GOFLAGS -race" $(COMPILE) $(LINT) run

generate:
	go generate ./...

check-format: $(LINT)
	$(LINT) fmt --diff
	cd conformance && $(LINT) fmt --diff
	cd conformance/apiserver && $(LINT) fmt --diff
	cd conformance/etcdtests && $(LINT) fmt --diff

# The output of go generate is in git: running it must change nothing.
check-generate:
	@set -eu; before=$$(git diff | sha256sum; git status --porcelain); \
	go generate ./...; \
	after=$$(git diff | sha256sum; git status --porcelain); \
	if [ "$$before" != "$$after" ]; then echo 'go generate changes the tree:' >&2; git status --short >&2; exit 1; fi

check-tidy:
	go mod tidy -diff
	cd bench/against-etcd && go mod tidy -diff
	cd bench/against-dragonboat && go mod tidy -diff
	cd backup/target/s3server && go mod tidy -diff
	cd deploy/tools && go mod tidy -diff
	cd deploy/grpcproxy && go mod tidy -diff
	cd console/tools && go mod tidy -diff
	cd console/browser && go mod tidy -diff
	cd conformance && go mod tidy -diff
	cd conformance/apiserver && go mod tidy -diff
	cd conformance/etcdtests && go mod tidy -diff

# Known vulnerabilities in what Skein calls, of its modules and of Go. Where Go's database (vuln.go.dev) cannot be
# reached, the entries of a fixed day take its place, from the module that it is made of; VULNDB=file:///DIR is another
# one. Without either it says that nothing was checked, and is no failure: the tree is as good as before. The Go is that of
# releases, go.mod's toolchain; where it cannot be had, the one that is there. What has become known of its standard library
# is no failure either: the next release takes a newer one. The last line says what was found, and by what.
VULNDB ?=
vulncheck: $(VULNCHECK)
	@out=$$(mktemp); trap 'rm -f "$$out"' EXIT; from='$(or $(VULNDB),the database of today)'; \
	toolchain=$$(go mod edit -json | sed -n 's/.*"Toolchain": "\(.*\)".*/\1/p'); \
	if GOTOOLCHAIN=$$toolchain go version >"$$out" 2>&1; then export GOTOOLCHAIN=$$toolchain; else cat "$$out"; fi; \
	check() { code=0; $(VULNCHECK) $$1 $(TAGS) ./... >"$$out" 2>&1 || code=$$?; }; \
	check $(addprefix -db=,$(VULNDB)); \
	if [ $$code != 0 ] && grep -q '^govulncheck: fetching vulnerabilities:' "$$out"; then \
	  from='golang.org/x/vulndb@$(VULNDB_VERSION), since the database cannot be reached'; \
	  dir=$$(cd /tmp && go mod download -json golang.org/x/vulndb@$(VULNDB_VERSION) | sed -n 's/^\t"Dir": "\(.*\)",$$/\1/p'); \
	  if [ -z "$$dir" ]; then \
	    echo 'vulncheck: NOTHING WAS CHECKED: no database of vulnerabilities can be reached'; exit 0; \
	  fi; \
	  check "-db=file://$$dir/data/osv"; \
	fi; \
	sed '/^      #\([2-9]\|[0-9][0-9]\)/d' "$$out"; \
	if [ $$code = 0 ]; then \
	  echo "vulncheck: clean with $$(go env GOVERSION), by $$from"; \
	elif [ $$code = 3 ] && grep -q '^  Standard library' "$$out" && ! grep -q '^  Module: ' "$$out"; then \
	  newer=$$(sed -n 's/.*Fixed in: .*@\(go[0-9.]*\)$$/\1/p' "$$out" | sort -V | tail -n 1); \
	  echo "vulncheck: the modules are clean, and the standard library of $$(go env GOVERSION) is not: a release needs $$newer or later; by $$from"; \
	else \
	  echo "vulncheck: NOT CLEAN ($$code), by $$from"; exit $$code; \
	fi

tools: $(LINT) $(VULNCHECK)

# Uses an installed golangci-lint of the pinned version.
$(LINT):
	@mkdir -p $(TOOLS)
	@set -eu; have=$$(command -v golangci-lint || true); \
	if "$$have" version 2>/dev/null | grep -q 'version $(GOLANGCI_VERSION) '; then ln -sf "$$have" $@; exit 0; fi; \
	into=$$(mktemp -d); \
	GOBIN=$$into go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v$(GOLANGCI_VERSION); \
	mv $$into/golangci-lint $@; rmdir $$into

$(VULNCHECK):
	@mkdir -p $(TOOLS)
	@set -eu; into=$$(mktemp -d); \
	GOBIN=$$into go install golang.org/x/vuln/cmd/govulncheck@v$(VULNCHECK_VERSION); \
	mv $$into/govulncheck $@; rmdir $$into

clean:
	rm -rf bin
