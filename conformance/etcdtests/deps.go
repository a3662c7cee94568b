//go:build suite

// Package etcdtests runs etcd's own tests of users against Skein, unchanged from the module cache: those that start a
// binary named etcd get skein. It has its own requirements, those of etcd's tests.
package etcdtests

// The imports of etcd's tests and commands must be in go.mod and go.sum, because they are built as a part of this module.
import (
	_ "go.etcd.io/etcd/etcdctl/v3"
	_ "go.etcd.io/etcd/etcdutl/v3"
	_ "go.etcd.io/etcd/tests/v3/common"
	_ "go.etcd.io/etcd/tests/v3/e2e"
)
