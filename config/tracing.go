package config

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Tracing is how traces of requests go to a collector.
type Tracing struct {
	// Enabled switches it on.
	Enabled bool
	// Address is the collector's, for OTLP over gRPC without TLS. Default localhost:4317.
	Address string
	// Service is the name of the service in all spans, default etcd, and Instance tells its nodes apart; empty leaves
	// it out.
	Service, Instance string
	// SamplingRate is how many of a million requests are traced of which their client does not say it. Default 0.
	SamplingRate int
}

// maxSamplingRate traces all requests.
const maxSamplingRate = 1_000_000

func (t *Tracing) validate() error {
	switch {
	case !t.Enabled:
		return nil
	case t.Address == "":
		return errors.New("--distributed-tracing-address must not be empty with --enable-distributed-tracing")
	case t.SamplingRate < 0 || t.SamplingRate > maxSamplingRate:
		return fmt.Errorf("--distributed-tracing-sampling-rate %d: it counts requests of a million, from 0 to %d", t.SamplingRate, maxSamplingRate)
	}
	return nil
}

// slowFlags are those of slow requests and of traces.
func slowFlags() []Flag {
	return []Flag{
		{
			Name: "warning-apply-duration", kind: kindDuration, Default: "100ms", File: "warning-apply-duration", Section: sectionFeatures,
			Usage: "Duration above which applying a batch of entries is logged as a warning, and counted.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.WarnApply }),
		},
		{
			Name: "enable-distributed-tracing", kind: kindBool, Default: "false", File: "enable-distributed-tracing", Section: sectionTracing,
			Usage: "Send traces of unary calls by OTLP over gRPC. Spans have ids and sizes, and no keys.",
			set:   setBool(func(c *Config) *bool { return &c.Tracing.Enabled }),
		},
		{
			Name: "distributed-tracing-address", kind: kindString, Default: "localhost:4317", File: "distributed-tracing-address", Section: sectionTracing,
			Usage: "Address of the collector, which is called without TLS.", set: setString(func(c *Config) *string { return &c.Tracing.Address }),
		},
		{
			Name: "distributed-tracing-service-name", kind: kindString, Default: "etcd", File: "distributed-tracing-service-name", Section: sectionTracing,
			Usage: "Name of the service in all spans.", set: setString(func(c *Config) *string { return &c.Tracing.Service }),
		},
		{
			Name: "distributed-tracing-instance-id", kind: kindString, Default: "", File: "distributed-tracing-instance-id", Section: sectionTracing,
			Usage: "What tells the spans of this node from those of others. Empty leaves it out.", set: setString(func(c *Config) *string { return &c.Tracing.Instance }),
		},
		{
			Name: "distributed-tracing-sampling-rate", kind: kindInt, Default: "0", File: "distributed-tracing-sampling-rate", Section: sectionTracing,
			Usage: "How many of a million calls are traced. What a client traces is traced here too, whatever the rate.",
			set: func(c *Config, v value) error {
				if v.i < math.MinInt32 || v.i > math.MaxInt32 {
					return errors.New("value out of range")
				}
				c.Tracing.SamplingRate = int(v.i)
				return nil
			},
		},
	}
}
