package main

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/alone"
	"github.com/skeindb/skein/transport"
)

// What Skein's hosts talk over. Both encrypt.
const (
	quicCarrier = "quic"
	tlsCarrier  = "tls"
)

// skein is three hosts of package raftgroup.
type skein struct {
	load *alone.Load
	data []byte
}

func startSkein(ctx context.Context, s settings, l *latencies) (side, error) {
	o := alone.Options{Dir: s.Dir, Groups: s.Groups, Depth: s.Depth, Observer: observer{l}}
	if s.Carrier == tlsCarrier {
		o.Carrier = transport.CarrierTLS
	}
	load, err := alone.Start(ctx, o)
	if err != nil {
		return nil, err
	}
	return &skein{load, make([]byte, s.Bytes)}, nil
}

// drive gives each proposal data of its own, as a caller has to. Dragonboat's Propose
// makes that copy itself.
func (s *skein) drive(stop *atomic.Bool) error {
	s.load.Propose(func() []byte { return slices.Clone(s.data) }, func() bool { return !stop.Load() })
	return nil
}

func (s *skein) applied() int64 { return s.load.Applied() }
func (s *skein) check() error   { return s.load.Check() }
func (s *skein) close() error   { return s.load.Close() }

// observer times the proposals.
type observer struct{ l *latencies }

func (o observer) Proposed(g keyspace.GroupID)       { o.l.proposed(int(g - 1)) }
func (o observer) Applied(g keyspace.GroupID, n int) { o.l.applied(int(g-1), n) }
