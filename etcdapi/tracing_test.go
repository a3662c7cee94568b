package etcdapi

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/rangeapi/stages"
)

// fakeCollector keeps the spans that it gets.
type fakeCollector struct {
	collector.UnimplementedTraceServiceServer
	addr string

	mu       sync.Mutex
	spans    []*tracepb.Span
	resource string
}

func (f *fakeCollector) Export(_ context.Context, q *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range q.GetResourceSpans() {
		f.resource = fmt.Sprint(r.GetResource())
		for _, s := range r.GetScopeSpans() {
			f.spans = append(f.spans, s.GetSpans()...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// named returns the only span of the name.
func (f *fakeCollector) named(t *testing.T, name string) *tracepb.Span {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	var found *tracepb.Span
	for _, s := range f.spans {
		if s.GetName() == name {
			if found != nil {
				t.Fatalf("two spans are named %s", name)
			}
			found = s
		}
	}
	if found == nil {
		t.Fatalf("no span is named %s: %v", name, f.spans)
	}
	return found
}

func newCollector(t *testing.T) *fakeCollector {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f, s := &fakeCollector{addr: l.Addr().String()}, grpc.NewServer()
	collector.RegisterTraceServiceServer(s, f)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() {
		s.Stop()
		<-done
	})
	return f
}

// tracedRig is a server that traces by that rate.
func tracedRig(t *testing.T, addr string, rate int, log *zap.Logger) *rig {
	t.Helper()
	tr, err := NewTracing(t.Context(), TracingOptions{Address: addr, Service: "etcd", Instance: "n1", SamplingRate: rate, Clock: clock.System(), Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	return newRig(t, "http", func(o *Options) { o.Tracing = tr })
}

// stopWith stops the server once the collector has the span of that name, which ends after those below it. The stop itself
// gives a slow collector a second, and a call's span may end after its answer.
func (r *rig) stopWith(t *testing.T, f *fakeCollector, name string) {
	t.Helper()
	for {
		if err := r.opts.Tracing.provider.ForceFlush(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.mu.Lock()
		has := slices.ContainsFunc(f.spans, func(s *tracepb.Span) bool { return s.GetName() == name })
		f.mu.Unlock()
		if has {
			break
		}
		time.Sleep(time.Millisecond)
	}
	r.stopNow()
}

func (r *rig) stopNow() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	r.Stop(ctx)
}

// A traced put has gRPC's span, one under etcd's name and those of its stages, each within the one above. None has its
// key or value. The ranges are asked for their records.
func TestATracedPut(t *testing.T) {
	f := newCollector(t)
	r := tracedRig(t, f.addr, MaxSamplingRate, zap.NewNop())
	r.kv.hook = func(ctx context.Context) error {
		if !stages.Of(ctx).Traced() {
			t.Error("nobody is asked for a record")
		}
		record := &stages.Record{Range: 12, Node: 0xc, Took: 30 * time.Microsecond}
		record.Spent[stages.Evaluation], record.Spent[stages.Quorum] = 10*time.Microsecond, 20*time.Microsecond
		stages.Of(ctx).Note(record)
		return nil
	}
	if _, err := r.client(t, clientv3.Config{}).Put(t.Context(), "a-key-nobody-reads", "a-value-nobody-reads"); err != nil {
		t.Fatal(err)
	}
	r.stopWith(t, f, "etcdserverpb.KV/Put")
	above := f.named(t, "etcdserverpb.KV/Put")
	for _, name := range []string{"put", "leader", "quorum"} {
		s := f.named(t, name)
		if string(s.GetParentSpanId()) != string(above.GetSpanId()) || string(s.GetTraceId()) != string(above.GetTraceId()) {
			t.Errorf("%s is not below %s", name, above.GetName())
		}
		above = s
	}
	if q, e := f.named(t, "quorum"), f.named(t, "evaluation"); q.GetEndTimeUnixNano()-q.GetStartTimeUnixNano() != 20_000 || e.GetEndTimeUnixNano() != q.GetStartTimeUnixNano() {
		t.Errorf("%v, %v", e, q)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if text := fmt.Sprint(f.spans); strings.Contains(text, "nobody-reads") || !strings.Contains(text, "12") {
		t.Errorf("%s", text)
	}
	if !strings.Contains(f.resource, "n1") || !strings.Contains(f.resource, "etcd") {
		t.Errorf("the resource is %s", f.resource)
	}
}

// At rate 0 what a client traces is traced, and nothing else. A call that is not traced asks no range.
func TestAClientsTrace(t *testing.T) {
	f := newCollector(t)
	r := tracedRig(t, f.addr, 0, zap.NewNop())
	kv := pb.NewKVClient(r.client(t, clientv3.Config{}).ActiveConnection())
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	for _, flags := range []string{"", "-00", "-01"} {
		ctx := t.Context()
		if flags != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", "00-"+trace+"-00f067aa0ba902b7"+flags)
		}
		r.kv.hook = func(ctx context.Context) error {
			if stages.Of(ctx).Traced() != (flags == "-01") {
				t.Errorf("traceparent %q: traced %t", flags, stages.Of(ctx).Traced())
			}
			return nil
		}
		if _, err := kv.Range(ctx, &pb.RangeRequest{Key: []byte("k")}); err != nil {
			t.Fatal(err)
		}
	}
	r.stopWith(t, f, "etcdserverpb.KV/Range")
	if s := f.named(t, "range"); fmt.Sprintf("%x", s.GetTraceId()) != trace {
		t.Errorf("%v", s)
	}
}

// Without a collector requests are served, the log says it once, and the server stops in time.
func TestTracesWithoutACollector(t *testing.T) {
	const addr = "127.0.0.1:1" // a port that the kernel gives to nobody
	lines, logs := observer.New(zap.WarnLevel)
	tr, err := NewTracing(t.Context(), TracingOptions{Address: addr, Service: "etcd", SamplingRate: MaxSamplingRate, Clock: clock.System(), Logger: zap.New(lines)})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, "http", func(o *Options) { o.Tracing, o.Logger = tr, zap.New(lines) })
	if _, err := r.client(t, clientv3.Config{}).Put(t.Context(), "k", "v"); err != nil {
		t.Fatal(err)
	}
	r.stopNow()
	if n := logs.FilterMessage("the collector of traces takes no spans").Len() + logs.FilterMessage("the last spans are lost").Len(); n == 0 {
		t.Errorf("the log says nothing: %v", logs.All())
	}
}
