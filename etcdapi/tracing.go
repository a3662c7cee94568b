package etcdapi

import (
	"context"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/rangeapi/stages"
)

// MaxSamplingRate samples each trace: rates are per million, as etcd's.
const MaxSamplingRate = 1_000_000

// tracesEvery lies between two lines about a collector that does not answer.
const tracesEvery = time.Minute

// TracingOptions are etcd's flags --distributed-tracing-*.
type TracingOptions struct {
	// Address is the collector's, for OTLP over gRPC without TLS.
	Address string
	// Service and Instance are attributes of all spans; an empty Instance is left out.
	Service, Instance string
	// SamplingRate is how many of a million calls are traced of which the client does not say whether. What the client
	// traces is traced here too.
	SamplingRate int
	Clock        clock.Clock
	Logger       *zap.Logger
}

// Tracing sends traces of unary calls to a collector. Nil traces nothing, and costs nothing.
type Tracing struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	clock    clock.Clock
	// giveUp ends what is being sent.
	giveUp context.CancelFunc
}

// NewTracing starts to send traces. Close ends it. It waits for no collector, and without one nothing but traces is
// lost.
func NewTracing(ctx context.Context, o TracingOptions) (*Tracing, error) {
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithInsecure(), otlptracegrpc.WithEndpoint(o.Address))
	if err != nil {
		return nil, fmt.Errorf("--distributed-tracing-address %s: %w", o.Address, err)
	}
	about := []attribute.KeyValue{attribute.String("service.name", o.Service)}
	if o.Instance != "" {
		about = append(about, attribute.String("service.instance.id", o.Instance))
	}
	sampler := sdktrace.NeverSample()
	if o.SamplingRate > 0 {
		sampler = sdktrace.TraceIDRatioBased(float64(o.SamplingRate) / MaxSamplingRate)
	}
	life, giveUp := context.WithCancel(context.Background())
	p := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(&toldExporter{SpanExporter: exporter, life: life, clock: o.Clock, log: o.Logger}),
		sdktrace.WithResource(resource.NewSchemaless(about...)),
		sdktrace.WithSampler(sdktrace.ParentBased(sampler)),
	)
	return &Tracing{provider: p, tracer: p.Tracer("github.com/skeindb/skein/etcdapi"), clock: o.Clock, giveUp: giveUp}, nil
}

// Close sends what is left until ctx ends.
func (t *Tracing) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	defer t.giveUp() // the library itself would go on for half a minute
	return t.provider.Shutdown(ctx)
}

// toldExporter has the log say that spans are lost. The library would say so to the process's standard error.
type toldExporter struct {
	sdktrace.SpanExporter
	life  context.Context //nolint:containedctx // it ends what the library does without a caller
	clock clock.Clock
	log   *zap.Logger
	// told is when the log was told last. The library exports one batch at a time.
	told clock.Time
}

// ExportSpans implements sdktrace.SpanExporter.
func (e *toldExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(e.life, cancel)
	defer stop()
	err := e.SpanExporter.ExportSpans(ctx, spans)
	if now := e.clock.Now(); err != nil && (e.told == 0 || now.Sub(e.told) >= tracesEvery) {
		e.told = now
		e.log.Warn("the collector of traces takes no spans", zap.Int("spans", len(spans)), zap.Error(err))
	}
	return nil
}

// option has gRPC make a span of each call.
func (t *Tracing) option() grpc.ServerOption {
	return grpc.StatsHandler(otelgrpc.NewServerHandler(
		otelgrpc.WithTracerProvider(t.provider),
		otelgrpc.WithPropagators(propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})),
	))
}

// closeTimeout is how long the collector may take for what is left.
const closeTimeout = time.Second

// closeTracing ends the traces.
func (s *Server) closeTracing(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if err := s.opts.Tracing.Close(ctx); err != nil {
		s.log.Warn("the last spans are lost", zap.Error(err))
	}
}

// samples says whether a call is traced.
func (t *Tracing) samples(ctx context.Context) bool {
	return t != nil && trace.SpanContextFromContext(ctx).IsSampled()
}

// spanNames are etcd's names of what a method does.
var spanNames = map[string]string{
	"/etcdserverpb.KV/Range": "range", "/etcdserverpb.KV/Put": "put", "/etcdserverpb.KV/DeleteRange": "delete_range",
	"/etcdserverpb.KV/Txn": "txn", "/etcdserverpb.KV/Compact": "compact",
	"/etcdserverpb.Lease/LeaseGrant": "lease_grant", "/etcdserverpb.Lease/LeaseRevoke": "lease_revoke",
}

// tell makes spans of a call that ends now: one under etcd's name, and those of its stages. Their lengths are measured;
// the order of what happened at once is not.
func (t *Tracing) tell(ctx context.Context, slow *stages.Slow, records []*stages.Record) {
	end := t.clock.Wall()
	at := end.Add(-slow.Took)
	name := spanNames[slow.Method]
	if name == "" {
		name = slow.Method[strings.LastIndexByte(slow.Method, '/')+1:]
	}
	ctx, span := t.tracer.Start(ctx, name, trace.WithTimestamp(at), trace.WithAttributes(
		attribute.Int64("range", int64(slow.Range)), attribute.Int("retries", int(slow.Retries)), attribute.String("cause", slow.Cause),
		attribute.Int("request_bytes", slow.RequestBytes), attribute.Int("response_bytes", slow.ResponseBytes),
	))
	defer span.End(trace.WithTimestamp(end))
	for _, p := range slow.Parts {
		if p.Name == stages.Present || p.Name == stages.Retries {
			at = t.span(ctx, p.Name, at, p.Took)
		}
	}
	for _, r := range records {
		// A record has lengths by the clock of its node: where it lies between question and answer is not known.
		begun := at
		if left := end.Sub(at) - r.Took; left > 0 {
			begun = at.Add(left / 2)
		}
		in, leader := t.tracer.Start(ctx, "leader", trace.WithTimestamp(begun), trace.WithAttributes(
			attribute.Int64("range", int64(r.Range)), attribute.String("node", r.Node.String()), attribute.Int("turns", int(r.Turns)),
		))
		stop := begun
		for s := range stages.Count {
			if r.Spent[s] > 0 {
				stop = t.span(in, s.String(), stop, r.Spent[s])
			}
		}
		leader.End(trace.WithTimestamp(stop))
	}
}

// span makes a span of a length, and returns its end.
func (t *Tracing) span(ctx context.Context, name string, at time.Time, took time.Duration) (end time.Time) {
	end = at.Add(took)
	_, span := t.tracer.Start(ctx, name, trace.WithTimestamp(at))
	span.End(trace.WithTimestamp(end))
	return end
}
