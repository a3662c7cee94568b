package placement

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
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
	// Full says, in the first part, that the whole map follows. Otherwise the rows go over the
	// map of the parts before.
	Full, Last bool
	Rows       []*fsm.Range
	// Nodes replace the node table where there are any.
	Nodes []fsm.Node
	// ClusterVersion is the map's, 0 for none.
	ClusterVersion keyspace.Version
	// Own is who holds the placement group; ConfIndex 0 is as before.
	Own keyspace.Descriptor
	// Access is a part of the users and roles, nil where they are as before.
	Access *fsm.AccessPart
	// Alarms are all alarms, nil where they are as before.
	Alarms *fsm.Alarms
	// Holds are all holds, nil where they are as before.
	Holds *fsm.Holds
	// Loading is the load of the cluster, nil where it is as before.
	Loading *fsm.Loading
}

// feedVersion leads a part. Version 3 knows the members of the placement group. Version 4 knows
// the directories of nodes, version 5 kept borders, version 6 leaving nodes, and version 7 the cluster version.
const feedVersion = 7

const (
	feedFull = 1 << 0
	feedLast = 1 << 1
	feedOwn  = 1 << 2
	// feedAccess is sent once users or roles were changed, so from cluster version 4 on.
	feedAccess = 1 << 3
	// feedAlarms is sent from cluster version 4 on.
	feedAlarms = 1 << 4
	// feedHolds is sent from cluster version 4 on.
	feedHolds = 1 << 5
	// feedLoading is sent once a load has begun, so from cluster version 4 on.
	feedLoading = 1 << 6
)

func (p *feedPart) encode() []byte {
	flags := byte(0)
	if p.Full {
		flags |= feedFull
	}
	if p.Last {
		flags |= feedLast
	}
	if p.Own.ConfIndex != 0 {
		flags |= feedOwn
	}
	if p.Access != nil {
		flags |= feedAccess
	}
	if p.Alarms != nil {
		flags |= feedAlarms
	}
	if p.Holds != nil {
		flags |= feedHolds
	}
	if p.Loading != nil {
		flags |= feedLoading
	}
	dst := []byte{feedVersion, flags}
	dst = binary.AppendUvarint(binary.AppendUvarint(dst, p.Version), uint64(p.ClusterVersion))
	if p.Own.ConfIndex != 0 {
		dst = keyspace.AppendDescriptor(dst, &p.Own)
	}
	if p.Access != nil {
		dst = fsm.AppendAccessPart(dst, p.Access)
	}
	if p.Alarms != nil {
		dst = fsm.AppendAlarms(binary.AppendUvarint(dst, p.Alarms.Changed), p.Alarms.All)
	}
	if p.Holds != nil {
		dst = fsm.AppendHolds(binary.AppendUvarint(dst, p.Holds.Changed), p.Holds.All)
	}
	if p.Loading != nil {
		dst = fsm.AppendLoading(dst, p.Loading)
	}
	dst = fsm.AppendNodes(dst, p.Nodes)
	dst = binary.AppendUvarint(dst, uint64(len(p.Rows)))
	for _, g := range p.Rows {
		dst = fsm.AppendRange(dst, g)
	}
	return dst
}

func decodeFeedPart(b []byte) (feedPart, error) {
	r := fsm.NewReader(b)
	r.VersionIs(feedVersion)
	flags := r.Byte()
	if flags&^(feedFull|feedLast|feedOwn|feedAccess|feedAlarms|feedHolds|feedLoading) != 0 {
		r.Failf("feed flags %x", flags)
	}
	p := feedPart{Full: flags&feedFull != 0, Last: flags&feedLast != 0, Version: r.Uvarint(), ClusterVersion: r.ClusterVersion()}
	if flags&feedOwn != 0 {
		if p.Own = r.Descriptor(); p.Own.ConfIndex == 0 {
			r.Fail(errors.New("a feed with members of no index"))
		}
	}
	if flags&feedAccess != 0 {
		a := r.AccessPart()
		p.Access = &a
	}
	if flags&feedAlarms != 0 {
		p.Alarms = &fsm.Alarms{Changed: r.Uvarint(), All: r.Alarms()}
	}
	if flags&feedHolds != 0 {
		p.Holds = &fsm.Holds{Changed: r.Uvarint(), All: r.Holds()}
	}
	if flags&feedLoading != 0 {
		l := r.Loading()
		p.Loading = &l
	}
	p.Nodes = r.Nodes()
	n := r.CountUpTo(feedRows, 11)
	for range n {
		g := r.RangeRow()
		if !r.OK() {
			break
		}
		p.Rows = append(p.Rows, &g)
	}
	if err := r.Finish(); err != nil {
		return feedPart{}, fmt.Errorf("decode part of the map feed: %w", err)
	}
	return p, nil
}

// encodeFeedRequest encodes the request that opens a feed: the version of the map that the
// asker has, 0 for none.
func encodeFeedRequest(since uint64) []byte {
	return binary.AppendUvarint([]byte{fsm.FormatVersion}, since)
}

func decodeFeedRequest(b []byte) (since uint64, err error) {
	r := fsm.NewReader(b)
	r.Version()
	since = r.Uvarint()
	if err := r.Finish(); err != nil {
		return 0, fmt.Errorf("decode request for the map feed: %w", err)
	}
	return since, nil
}

// serveFeed sends the map as of now, or the changes since a version, and then every change. It
// ends when ctx ends, gone is closed, or another node leads. The follower has no replica that
// raft tells of a new leader, so the end of the feed tells it. Changes that come while it sends
// are sent together.
func (s *Service) serveFeed(ctx context.Context, gone <-chan struct{}, since uint64, st transport.Stream) error {
	leader := keyspace.NodeID(0)
	for {
		_, moved := s.led()
		now := s.machine.leaderState().LeaderNode
		if now != 0 && leader != 0 && now != leader {
			return nil
		}
		leader = cmp.Or(now, leader)
		v, changed := s.machine.current()
		if v.Version > since {
			if err := sendMap(ctx, &v.Map, v.NodesChanged, since, st); err != nil {
				return err
			}
			since = v.Version
		}
		select {
		case <-changed:
		case <-moved:
		case <-gone:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sendMap sends what brings a map of version since to m, whose node table has last
// changed at nodesChanged.
func sendMap(ctx context.Context, m *fsm.Map, nodesChanged, since uint64, s transport.Stream) error {
	part := feedPart{Version: m.Version, ClusterVersion: m.ClusterVersion, Full: since == 0}
	if since == 0 || nodesChanged > since {
		part.Nodes = m.NodeTable()
	}
	if own := m.PlacementGroup(); since == 0 || own.ConfIndex > since {
		part.Own = own
	}
	if a := m.Alarms; a != nil && a.Changed > since && m.ClusterVersion >= keyspace.VersionAccess {
		part.Alarms = a
	}
	if h := m.Holds; h != nil && h.Changed > since && m.ClusterVersion >= keyspace.VersionData {
		part.Holds = h
	}
	if l := m.Loading; l != nil && l.Changed > since {
		part.Loading = l
	}
	bytes := 0
	next := func() error {
		err := s.Send(ctx, part.encode())
		part, bytes = feedPart{Version: m.Version, ClusterVersion: m.ClusterVersion}, 0
		return err
	}
	for a := range m.Access.Parts(since) {
		part.Access = a
		if err := next(); err != nil {
			return err
		}
	}
	for _, g := range m.RowsSince(since) {
		if len(part.Rows) == feedRows || bytes >= feedBytes {
			if err := next(); err != nil {
				return err
			}
		}
		part.Rows = append(part.Rows, g)
		bytes += 32 + len(g.Descriptor.Span.Start) + len(g.Descriptor.Span.End)
	}
	part.Last = true
	return s.Send(ctx, part.encode())
}

// feedReceiver puts the parts of a feed together.
type feedReceiver struct {
	base *fsm.Map
	rows []*fsm.Range
	// nodes, own and full are those of the parts since the last complete map.
	nodes []fsm.Node
	own   keyspace.Descriptor
	full  bool
	// access are the parts of users and roles since then.
	access []*fsm.AccessPart
	// alarms and holds are the newest that came since then.
	alarms *fsm.Alarms
	holds  *fsm.Holds
	// loading is the newest that came since then.
	loading *fsm.Loading
}

// receive takes one part and returns the new map where it was the last one.
func (f *feedReceiver) receive(b []byte) (*fsm.Map, error) {
	p, err := decodeFeedPart(b)
	if err != nil {
		return nil, err
	}
	f.full = f.full || p.Full
	f.rows = append(f.rows, p.Rows...)
	if len(p.Nodes) > 0 {
		f.nodes = p.Nodes
	}
	if p.Own.ConfIndex > 0 {
		f.own = p.Own
	}
	if p.Access != nil {
		f.access = append(f.access, p.Access)
	}
	if p.Alarms != nil {
		f.alarms = p.Alarms
	}
	if p.Holds != nil {
		f.holds = p.Holds
	}
	if p.Loading != nil {
		f.loading = p.Loading
	}
	if !p.Last {
		return nil, nil
	}
	base := f.base
	if f.full {
		base = &fsm.Map{}
	}
	if base == nil {
		return nil, fmt.Errorf("placement: feed brings version %d over a map that it never sent", p.Version)
	}
	next := base.With(p.Version, f.rows, f.nodes, f.own)
	next.ClusterVersion = p.ClusterVersion
	if next.Access, err = base.Access.With(f.access); err != nil {
		return nil, err
	}
	if f.alarms != nil {
		next.Alarms = f.alarms
	}
	if f.holds != nil {
		next.Holds = f.holds
	}
	if f.loading != nil {
		next.Loading = f.loading
	}
	if f.full {
		err = next.Check()
	} else {
		err = next.CheckAround(f.rows)
	}
	if err != nil {
		return nil, err
	}
	*f = feedReceiver{base: next}
	return next, nil
}
