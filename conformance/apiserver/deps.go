//go:build suite

package apiserver

// The imports of the suite's own tests must be in go.mod and go.sum, because the suite
// is built as a part of this module.
import (
	_ "k8s.io/apiserver/pkg/storage/cacher"
	_ "k8s.io/apiserver/pkg/storage/etcd3"
	_ "k8s.io/apiserver/pkg/storage/storagebackend/factory"
)
