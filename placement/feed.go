package placement

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// feedRows bounds the rows of one message of a feed, feedBytes about its size.
const (
	feedRows  = 4096
	feedBytes = 256 << 10
)

// feedPart is one message of the stream of changes of the map. The parts up to the
// one with Last together bring a map to Version.
type feedPart struct {
	Version uint64
	// Full says, in the first part, that what follows is the whole map; otherwise it
	// goes over the one that the parts before made.
	Full, Last bool
	Rows       []*Range
	// Nodes replace the node table where there are any.
	Nodes []Node
}

const (
	feedFull = 1 << 0
	feedLast = 1 << 1
)

func (p *feedPart) encode() []byte {
	flags := byte(0)
	if p.Full {
		flags |= feedFull
	}
	if p.Last {
		flags |= feedLast
	}
	dst := []byte{formatVersion, flags}
	dst = binary.AppendUvarint(dst, p.Version)
	dst = appendNodes(dst, p.Nodes)
	dst = binary.AppendUvarint(dst, uint64(len(p.Rows)))
	for _, g := range p.Rows {
		dst = appendRange(dst, g)
	}
	return dst
}

func decodeFeedPart(b []byte) (feedPart, error) {
	r := reader{b: b}
	r.version()
	flags := r.byte()
	if flags&^(feedFull|feedLast) != 0 {
		r.fail(fmt.Errorf("placement: feed flags %x", flags))
	}
	p := feedPart{Full: flags&feedFull != 0, Last: flags&feedLast != 0, Version: r.uvarint()}
	p.Nodes = r.nodes()
	n := r.count(feedRows, 10)
	for range n {
		g := r.rangeRow()
		if r.err != nil {
			break
		}
		p.Rows = append(p.Rows, &g)
	}
	if err := r.end(); err != nil {
		return feedPart{}, fmt.Errorf("decode part of the map feed: %w", err)
	}
	return p, nil
}

// feedRequest opens a feed: the version of the map that the asker has, 0 for none.
func encodeFeedRequest(since uint64) []byte {
	return binary.AppendUvarint([]byte{formatVersion}, since)
}

func decodeFeedRequest(b []byte) (since uint64, err error) {
	r := reader{b: b}
	r.version()
	since = r.uvarint()
	if err := r.end(); err != nil {
		return 0, fmt.Errorf("decode request for the map feed: %w", err)
	}
	return since, nil
}

// serveFeed sends the map as of now, or what changed since a version, and then
// every change, until ctx ends. Changes that come while it sends are sent together.
func serveFeed(ctx context.Context, m *machine, since uint64, s transport.Stream) error {
	for {
		v, changed := m.current()
		if v.Version > since {
			if err := sendMap(ctx, v, since, s); err != nil {
				return err
			}
			since = v.Version
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sendMap sends what brings a map of version since to v's.
func sendMap(ctx context.Context, v *View, since uint64, s transport.Stream) error {
	part := feedPart{Version: v.Version, Full: since == 0}
	if since == 0 || v.NodesChanged > since {
		part.Nodes = v.NodeTable()
	}
	bytes := 0
	for _, g := range v.since(since) {
		if len(part.Rows) == feedRows || bytes >= feedBytes {
			if err := s.Send(ctx, part.encode()); err != nil {
				return err
			}
			part = feedPart{Version: v.Version}
			bytes = 0
		}
		part.Rows = append(part.Rows, g)
		bytes += 32 + len(g.Descriptor.Span.Start) + len(g.Descriptor.Span.End)
	}
	part.Last = true
	return s.Send(ctx, part.encode())
}

// feedReceiver puts the parts of a feed together.
type feedReceiver struct {
	base *Map
	rows []*Range
	// nodes and full are those of the parts since the last complete map.
	nodes []Node
	full  bool
}

// receive takes one part and returns the new map where it was the last one.
func (f *feedReceiver) receive(b []byte) (*Map, error) {
	p, err := decodeFeedPart(b)
	if err != nil {
		return nil, err
	}
	f.full = f.full || p.Full
	f.rows = append(f.rows, p.Rows...)
	if len(p.Nodes) > 0 {
		f.nodes = p.Nodes
	}
	if !p.Last {
		return nil, nil
	}
	base := f.base
	if f.full {
		base = &Map{nodes: map[keyspace.NodeID]Node{}}
	}
	if base == nil {
		return nil, fmt.Errorf("placement: feed brings version %d over a map that it never sent", p.Version)
	}
	next := base.with(p.Version, f.rows, f.nodes)
	if err := next.check(); err != nil {
		return nil, err
	}
	*f = feedReceiver{base: next}
	return next, nil
}
