// Package emptykv is an etcd reduced to gRPC, with Skein's pipe: it answers each put, get and transaction
// at once with a prepared answer, and stores nothing. A load generator against it measures its own
// cost: client, connections, gRPC on both sides. `loadtest empty` runs it in a process
// of its own, whose metrics report its CPU as a server's do.
package emptykv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/loadtest/pipeserver"
)

// maxValueBytes is a gRPC client's default limit, less room for the rest of an answer.
const maxValueBytes = 4<<20 - 4096

// Config is the addresses and the answer of the server.
type Config struct {
	// Listen is the address of the gRPC port, Web that of /health and /metrics:
	// HOST:PORT.
	Listen, Web string
	// ValueBytes is the size of the value in each answer to a get.
	ValueBytes int
}

// Validate returns the errors of the Config.
func (c *Config) Validate() error {
	switch {
	case c.Listen == "" || c.Web == "":
		return errors.New("listen and web: both are needed")
	case c.ValueBytes < 0 || c.ValueBytes > maxValueBytes:
		return fmt.Errorf("value-size: %d is not between 0 and %d", c.ValueBytes, maxValueBytes)
	}
	return nil
}

// Run serves until ctx is done, and then returns nil. It returns an error if it cannot
// serve.
func Run(ctx context.Context, cfg Config) error {
	clients, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return fmt.Errorf("empty server: %w", err)
	}
	pages, err := net.Listen("tcp", cfg.Web)
	if err != nil {
		clients.Close()
		return fmt.Errorf("empty server: %w", err)
	}
	server := grpc.NewServer()
	k := newKV(cfg.ValueBytes)
	etcdserverpb.RegisterKVServer(server, k)
	etcdserverpb.RegisterMaintenanceServer(server, k)
	pipeserver.Register(server, k)
	web := &http.Server{Handler: handler()}
	failed := make(chan error, 2)
	var serving sync.WaitGroup
	serving.Go(func() { failed <- server.Serve(clients) })
	serving.Go(func() { failed <- web.Serve(pages) })
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	server.Stop()
	web.Close()
	serving.Wait()
	if err != nil {
		return fmt.Errorf("empty server: %w", err)
	}
	return nil
}

// handler serves the pages by which a cluster's nodes are monitored.
func handler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewGoCollector())
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
		// The client sees whether it got the answer.
		_, _ = io.WriteString(w, `{"health":"true","reason":""}`)
	})
	return mux
}

// kv answers. All answers share its content.
type kv struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedMaintenanceServer

	header *etcdserverpb.ResponseHeader
	put    *etcdserverpb.PutResponse
	txn    *etcdserverpb.TxnResponse
	value  []byte
}

// newKV makes answers whose headers are as long as those of a cluster in use.
func newKV(valueBytes int) *kv {
	const id, revision, term = 0xcdf818194e3a8c32, 1_000_000, 2
	header := &etcdserverpb.ResponseHeader{ClusterId: id, MemberId: id, Revision: revision, RaftTerm: term}
	return &kv{
		header: header,
		put:    &etcdserverpb.PutResponse{Header: header},
		txn: &etcdserverpb.TxnResponse{
			Header: header, Succeeded: true,
			Responses: []*etcdserverpb.ResponseOp{{Response: &etcdserverpb.ResponseOp_ResponsePut{ResponsePut: &etcdserverpb.PutResponse{}}}},
		},
		value: make([]byte, valueBytes),
	}
}

// Put implements etcdserverpb.KVServer.
func (k *kv) Put(context.Context, *etcdserverpb.PutRequest) (*etcdserverpb.PutResponse, error) {
	return k.put, nil
}

// Txn implements etcdserverpb.KVServer.
func (k *kv) Txn(context.Context, *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	return k.txn, nil
}

// Range implements etcdserverpb.KVServer: it returns exactly one key, the requested
// one.
func (k *kv) Range(_ context.Context, in *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	revision := k.header.Revision
	return &etcdserverpb.RangeResponse{
		Header: k.header, Count: 1,
		Kvs: []*mvccpb.KeyValue{{Key: in.Key, Value: k.value, CreateRevision: revision, ModRevision: revision, Version: 1}},
	}, nil
}

// Status implements etcdserverpb.MaintenanceServer.
func (k *kv) Status(context.Context, *etcdserverpb.StatusRequest) (*etcdserverpb.StatusResponse, error) {
	return &etcdserverpb.StatusResponse{Header: k.header, Version: "empty"}, nil
}
