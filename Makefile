# make check is what CI runs. Tools are pinned here and live in bin/tools.

GOLANGCI_VERSION           := 2.15.0
PROTOC_GEN_GO_VERSION      := v1.36.12
PROTOC_GEN_GO_GRPC_VERSION := v1.6.2

TOOLS := $(CURDIR)/bin/tools
export PATH := $(TOOLS):$(PATH)

# Two packages at a time: the tests of a storage system want their cores.
TEST_P       ?= 2
TEST_TIMEOUT ?= 10m
FUZZTIME     ?= 10s
BENCHTIME    ?= 1s
SIM_SEEDS    ?= 100
# The commit goes into the binaries, and from there into the load test's reports.
BUILD        := go build -buildvcs=auto

.PHONY: build check test fuzz bench bench-against-etcd sim fmt lint generate \
	check-format check-vet check-generate check-tidy tools clean

build:
	$(BUILD) -o bin/skein ./cmd/skein
	$(BUILD) -o bin/loadtest ./cmd/loadtest

check: check-format check-vet lint check-generate check-tidy test

test:
	go test -race -tags invariants -shuffle=on -timeout $(TEST_TIMEOUT) -p $(TEST_P) ./...

# Each fuzz target of the tree for FUZZTIME; a finding is kept in its testdata.
fuzz:
	@set -eu; for dir in $$(git ls-files '*_test.go' | xargs grep -l '^func Fuzz' | xargs -r -n1 dirname | sort -u); do \
	  for target in $$(grep -ho '^func Fuzz[A-Za-z0-9_]*' $$dir/*_test.go | sed 's/^func //' | sort -u); do \
	    echo "== $$dir $$target"; \
	    go test -tags invariants -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) ./$$dir; \
	  done; \
	done

bench:
	go test -run '^$$' -bench . -benchtime $(BENCHTIME) -p 1 ./...

# The same load on a three-node etcd and a three-node Skein, by turns.
bench-against-etcd:
	cd bench/against-etcd && go run . $(ARGS)

# The simulator over many seeds; SKEIN_SIM_SEEDS is read by package sim.
sim:
	SKEIN_SIM_SEEDS=$(SIM_SEEDS) go test -race -tags invariants -count=1 -timeout 60m -v ./sim/...

fmt: $(TOOLS)/golangci-lint
	golangci-lint fmt

lint: $(TOOLS)/golangci-lint
	golangci-lint run
	cd bench/against-etcd && golangci-lint run

generate: $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc
	go generate ./...

check-format: $(TOOLS)/golangci-lint
	golangci-lint fmt --diff

check-vet:
	go vet -tags invariants ./...
	cd bench/against-etcd && go vet .

# What go generate writes is in git already: running it changes nothing.
check-generate: $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc
	@set -eu; before=$$(git diff | sha256sum; git status --porcelain); \
	go generate ./...; \
	after=$$(git diff | sha256sum; git status --porcelain); \
	if [ "$$before" != "$$after" ]; then echo 'go generate changes the tree:' >&2; git status --short >&2; exit 1; fi

check-tidy:
	go mod tidy -diff

tools: $(TOOLS)/golangci-lint $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc

# A golangci-lint of the pinned version that the machine has already is taken as
# it is; to compile one takes minutes.
$(TOOLS)/golangci-lint: Makefile
	@mkdir -p $(TOOLS)
	@set -eu; rm -f $@; for have in $$(PATH="$$(go env GOPATH)/bin:$$PATH" command -v golangci-lint || true); do \
	  if "$$have" version 2>/dev/null | grep -q 'version $(GOLANGCI_VERSION) '; then ln -sf "$$have" $@; fi; \
	done; \
	if [ ! -x $@ ]; then GOBIN=$(TOOLS) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v$(GOLANGCI_VERSION); fi; \
	touch -h $@

$(TOOLS)/protoc-gen-go: Makefile
	GOBIN=$(TOOLS) go install google.golang.org/protobuf/cmd/protoc-gen-go@$(PROTOC_GEN_GO_VERSION)
	@touch $@

$(TOOLS)/protoc-gen-go-grpc: Makefile
	GOBIN=$(TOOLS) go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@$(PROTOC_GEN_GO_GRPC_VERSION)
	@touch $@

clean:
	rm -rf bin
