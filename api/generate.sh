#!/bin/sh
# Makes the Go code of the .proto files. Needs protoc (Debian: protobuf-compiler);
# the two plugins are built in their pinned versions, outside of this module.
set -eu
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
GOBIN=$bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
GOBIN=$bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
PATH=$bin:$PATH protoc --proto_path=. \
	--go_out=. --go_opt=paths=source_relative \
	--go-grpc_out=. --go-grpc_opt=paths=source_relative \
	adminpb/admin.proto datapb/data.proto datapb/load.proto
# pipe.proto imports etcd's files, which are in no one place: they are taken from the Go code that is linked.
go run ./descriptors >"$bin/etcd.binpb"
PATH=$bin:$PATH protoc --proto_path=. --descriptor_set_in="$bin/etcd.binpb" \
	--go_out=. --go_opt=paths=source_relative \
	--go-grpc_out=. --go-grpc_opt=paths=source_relative \
	pipepb/pipe.proto
