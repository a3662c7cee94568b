package loadtest

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/loadtest/fakekv"
)

// unaries counts etcd's calls of the KV service.
type unaries struct{ atomic.Int64 }

func (u *unaries) option() grpc.ServerOption {
	return grpc.UnaryInterceptor(func(ctx context.Context, in any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if strings.HasPrefix(info.FullMethod, "/"+etcdserverpb.KV_ServiceDesc.ServiceName+"/") {
			u.Add(1)
		}
		return next(ctx, in)
	})
}

func pipeConfig(endpoints ...string) Config {
	cfg := smallConfig(endpoints...)
	cfg.API, cfg.Conns, cfg.Total = APIPipe, len(endpoints), 1000
	return cfg
}

// TestByPipe: whole runs by the pipe, of which no request is a call of etcd's. The report says so.
func TestByPipe(t *testing.T) {
	for _, workload := range []Workload{Put, Get, Mixed, Txn, Range} {
		t.Run(string(workload), func(t *testing.T) {
			s, calls := &fakekv.Store{}, &unaries{}
			cfg := pipeConfig(serve(t, s, calls.option()), serve(t, s, calls.option()))
			cfg.Workload, cfg.Fill, cfg.Cleanup = workload, true, true
			var out bytes.Buffer
			r, err := Run(t.Context(), cfg, &out)
			if err != nil || r.Err() != nil || r.Operations != 1000 || r.Verify.Acknowledged != 500 || r.CleanedUp != 500 || s.Len() != 0 {
				t.Errorf("%v, %v, %d operations, %+v, %d cleaned up, %d are left", err, r.Err(), r.Operations, r.Verify, r.CleanedUp, s.Len())
			}
			if n := calls.Load(); n != 0 {
				t.Errorf("%d calls of etcd's KV", n)
			}
			if text, _, _ := strings.Cut(out.String(), "\n"); !strings.Contains(text, " by the pipe: 20 clients, 2 pipes, 2 endpoints;") {
				t.Error(text)
			}
			if text, err := json.Marshal(r); err != nil || !strings.Contains(string(text), `"api":"pipe"`) {
				t.Errorf("%v\n%s", err, text)
			}
		})
	}
}

// TestByPipeFindsLoss: a server that forgets is found by the pipe too.
func TestByPipeFindsLoss(t *testing.T) {
	s := &fakekv.Store{}
	s.After = func(_ context.Context, n int64) error {
		if n == 990 {
			s.Edit(func(kvs map[string]*mvccpb.KeyValue) { clear(kvs) })
		}
		return nil
	}
	r, err := Run(t.Context(), pipeConfig(serve(t, s)), io.Discard)
	if err != nil || r.Broken() == nil || r.Verify.Violations < 300 {
		t.Errorf("%v, %+v", err, r.Verify)
	}
}

// TestByPipeErrors: what is refused, and what may have happened, is told apart by the pipe as by calls.
func TestByPipeErrors(t *testing.T) {
	s := &fakekv.Store{
		Before: func(_ context.Context, n int64) error {
			if n <= 1000 && n%100 == 1 {
				return rpctypes.ErrGRPCRequestTooManyRequests
			}
			return nil
		},
		After: func(_ context.Context, n int64) error {
			switch {
			case n <= 1000 && n%100 == 2:
				return rpctypes.ErrGRPCTimeout
			case n <= 1000 && n%100 == 3:
				return status.Error(codes.Unavailable, "the answer was lost")
			}
			return nil
		},
	}
	r, err := Run(t.Context(), pipeConfig(serve(t, s)), io.Discard)
	if err != nil || r.Broken() != nil || r.Failed != 30 || r.Verify.Unknown != 20 {
		t.Errorf("%v, %v, %d failed, %+v", err, r.Broken(), r.Failed, r.Verify)
	}
	for _, want := range []string{
		"ResourceExhausted: etcdserver: too many requests", "Unavailable: the answer was lost",
		"Unknown: client: no answer came, and the change may have happened: etcdserver: request timed out",
	} {
		if r.Errors[want] != 10 {
			t.Errorf("%d times %q in %v", r.Errors[want], want, r.Errors)
		}
	}
}

// TestByPipeTimeout: a request without an answer is given up in time, its fate is unknown, and the client's next one is its own.
func TestByPipeTimeout(t *testing.T) {
	s := &fakekv.Store{Before: func(ctx context.Context, n int64) error {
		if n == 5 {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}}
	cfg := pipeConfig(serve(t, s))
	cfg.Clients, cfg.Total, cfg.Timeout = 1, 50, 200*time.Millisecond
	r, err := Run(t.Context(), cfg, io.Discard)
	if err != nil || r.Broken() != nil || r.Failed == 0 || r.Verify.Unknown != r.Failed {
		t.Errorf("%v, %v, %d failed: %v, %+v", err, r.Broken(), r.Failed, r.Errors, r.Verify)
	}
}

// TestKubernetesByPipe: transactions and pages go by the pipe, leases and watchers by etcd's calls.
func TestKubernetesByPipe(t *testing.T) {
	s, calls := &fakekv.Store{}, &unaries{}
	cfg := kubeConfig(serve(t, s, calls.option()))
	cfg.API, cfg.Conns, cfg.Cleanup, cfg.Total = APIPipe, 1, true, 1000
	r, err := Run(t.Context(), cfg, io.Discard)
	if err != nil || r.Err() != nil || r.Operations != 1000 || r.Watch.Lost+r.Watch.Failed != 0 || s.Leases() != 0 || calls.Load() != 0 {
		t.Errorf("%v, %v, %d operations, %+v, %d leases, %d calls of KV", err, r.Err(), r.Operations, r.Watch, s.Leases(), calls.Load())
	}
}

// TestPipeLogin: with a user a pipe has his login, and a wrong password is told at the start.
func TestPipeLogin(t *testing.T) {
	cfg := pipeConfig(serve(t, &fakekv.Store{User: "root", Password: "secret"}))
	cfg.User, cfg.Password = "root", "secret"
	if r, err := Run(t.Context(), cfg, io.Discard); err != nil || r.Err() != nil || r.Operations != 1000 {
		t.Errorf("%v, %v, %d operations", err, r.Err(), r.Operations)
	}
	cfg.Password = "wrong"
	if s, err := dial(&cfg); err == nil || !strings.Contains(err.Error(), "log in as root: ") || !strings.Contains(err.Error(), "etcdserver: authentication failed") {
		t.Errorf("with a wrong password: %v, %v", s, err)
	}
}

// TestNoPipe: an endpoint without pipes is named as that, before anything is put.
func TestNoPipe(t *testing.T) {
	s := &fakekv.Store{NoPipe: true}
	cfg := pipeConfig(serve(t, s))
	if _, err := Run(t.Context(), cfg, io.Discard); err == nil || !strings.Contains(err.Error(), cfg.Endpoints[0]+" serves no pipe: it is an etcd") || s.Len() != 0 {
		t.Errorf("%v, %d keys", err, s.Len())
	}
	gone, stop, err := (&fakekv.Store{}).Serve()
	if err != nil {
		t.Fatal(err)
	}
	stop()
	if _, err := Run(t.Context(), pipeConfig(gone), io.Discard); err == nil || !strings.Contains(err.Error(), "nobody listens at "+gone) {
		t.Error(err)
	}
}

// TestSweepByPipe: a sweep goes by the pipe, the clean-up at its end too.
func TestSweepByPipe(t *testing.T) {
	s, calls := &fakekv.Store{}, &unaries{}
	cfg := pipeConfig(serve(t, s, calls.option()))
	cfg.Total, cfg.Cleanup = 100, true
	r, err := Sweep(t.Context(), SweepConfig{Run: cfg, Over: SweepClients, Steps: []float64{1, 2}, P99: time.Hour}, io.Discard)
	if err != nil || len(r.Steps) != 2 || r.Broken() != nil || s.Len() != 0 || calls.Load() != 0 {
		t.Errorf("%v, %+v, %d keys, %d calls of KV", err, r, s.Len(), calls.Load())
	}
}
