//go:build suite

package apiserver

// What the suite's own tests import must stand in go.mod and go.sum: the suite is built
// as a part of this module.
import (
	_ "k8s.io/apiserver/pkg/storage/cacher"
	_ "k8s.io/apiserver/pkg/storage/etcd3"
	_ "k8s.io/apiserver/pkg/storage/storagebackend/factory"
)
