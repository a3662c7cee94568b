package dataapi

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
)

// RegisterData adds the service to a gRPC server, such as etcdapi's.
func RegisterData(s grpc.ServiceRegistrar, c *Cutter) {
	datapb.RegisterDataServer(s, &dataServer{c: c})
}

type dataServer struct {
	datapb.UnimplementedDataServer
	c *Cutter
}

// Bounds of a part of a cut.
const (
	partLeases = 10_000
	partBytes  = 512 << 10
)

// Cut implements the service.
func (s *dataServer) Cut(q *datapb.CutRequest, st datapb.Data_CutServer) error {
	cut, err := s.c.Cut(st.Context(), CutOptions{Kind: q.GetKind(), Owner: q.GetOwner(), From: keyspace.Revision(q.GetFromRevision()), Hold: fsm.HoldID(q.GetHold())})
	if err != nil {
		return cutError(err)
	}
	for _, p := range cut.parts() {
		if err := st.Send(p); err != nil {
			if q.GetHold() == 0 {
				_ = s.c.ReleaseSoon(st.Context(), cut.Hold) // nobody knows of it
			}
			return err
		}
	}
	return nil
}

// cutError words the error of a cut. That there are too many holds says how one ends.
func cutError(err error) error {
	g := kverror.GRPC(err)
	if e := kverror.Of(err); e.Kind == kverror.TooManyRequests && e.Detail != "" {
		return status.Error(status.Code(g), "skein: "+e.Detail)
	}
	return g
}

// parts divides the cut into messages.
func (c *Cut) parts() []*datapb.CutPart {
	p := &datapb.CutPart{
		Hold: uint64(c.Hold), HeldRevision: int64(c.Held), Revision: int64(c.Revision), CompactedRevision: int64(c.Compacted),
		ClusterId: uint64(c.Cluster), TimeUnixMs: c.Time.UnixMilli(),
	}
	parts, size := []*datapb.CutPart{p}, 0
	room := func(n int) {
		if size += n; size > partBytes {
			p, size = &datapb.CutPart{}, n
			parts = append(parts, p)
		}
	}
	for i := range c.Leases {
		room(partBytes / partLeases)
		l := &c.Leases[i]
		p.Leases = append(p.Leases, &datapb.Lease{Id: int64(l.ID), TtlSeconds: l.TTL, RemainingMs: l.Remaining.Milliseconds()})
	}
	for i := range c.Access {
		room(len(c.Access[i].Key) + len(c.Access[i].Value))
		p.Access = append(p.Access, &datapb.AccessRow{Key: c.Access[i].Key, Value: c.Access[i].Value})
	}
	for _, b := range c.Borders {
		room(len(b) + 8)
		p.Borders = append(p.Borders, b)
	}
	return parts
}

// add takes in a part of what parts returned; the first one begins the cut.
func (c *Cut) add(p *datapb.CutPart, first bool) {
	if first {
		*c = Cut{
			Hold: fsm.HoldID(p.GetHold()), Held: keyspace.Revision(p.GetHeldRevision()), Revision: keyspace.Revision(p.GetRevision()),
			Compacted: keyspace.Revision(p.GetCompactedRevision()), Cluster: keyspace.ClusterID(p.GetClusterId()), Time: time.UnixMilli(p.GetTimeUnixMs()),
		}
	}
	for _, l := range p.GetLeases() {
		c.Leases = append(c.Leases, Lease{ID: keyspace.LeaseID(l.GetId()), TTL: l.GetTtlSeconds(), Remaining: time.Duration(l.GetRemainingMs()) * time.Millisecond})
	}
	for _, r := range p.GetAccess() {
		c.Access = append(c.Access, fsm.AccessRow{Key: r.GetKey(), Value: r.GetValue()})
	}
	c.Borders = append(c.Borders, p.GetBorders()...)
}

// Renew implements the service.
func (s *dataServer) Renew(ctx context.Context, q *datapb.RenewRequest) (*datapb.RenewResponse, error) {
	h, err := s.c.Renew(ctx, fsm.HoldID(q.GetHold()), keyspace.Revision(q.GetRevision()))
	if err != nil {
		return nil, kverror.GRPC(err)
	}
	return &datapb.RenewResponse{HeldRevision: int64(h.Revision), ExpiresUnixMs: int64(h.Expires)}, nil
}

// Release implements the service.
func (s *dataServer) Release(ctx context.Context, q *datapb.ReleaseRequest) (*datapb.ReleaseResponse, error) {
	if err := s.c.Release(ctx, fsm.HoldID(q.GetHold())); err != nil {
		return nil, kverror.GRPC(err)
	}
	return &datapb.ReleaseResponse{}, nil
}

// Read implements the service. It has one page of versions and one block of them in memory, however slowly the
// client takes them.
func (s *dataServer) Read(q *datapb.ReadRequest, st datapb.Data_ReadServer) error {
	cut := mvcc.Cut{Select: selection(q.GetSelect()), At: keyspace.Revision(q.GetRevision()), After: keyspace.Revision(q.GetAfterRevision())}
	w := block.NewWriter(block.ByKey, func(b []byte, _ block.Sum) error { return st.Send(&datapb.ReadResponse{Block: b}) })
	from := mvcc.VersionCursor{Key: q.GetStart(), Below: keyspace.Revision(q.GetBelow())}
	err := s.c.Read(st.Context(), cut, from, q.GetEnd(), w.Add, func(next *mvcc.VersionCursor) error {
		// A client that gets nothing for long would not know that anything happens.
		if err := w.Flush(); err != nil {
			return err
		}
		return st.Send(&datapb.ReadResponse{NextStart: next.Key, NextBelow: int64(next.Below)})
	})
	if err == nil {
		err = w.Flush()
	}
	return kverror.GRPC(err)
}

// selection is the selection of a request, or one that no cut has.
func selection(s datapb.Select) mvcc.Selection {
	switch s {
	case datapb.Select_SELECT_LATEST:
		return mvcc.SelectLatest
	case datapb.Select_SELECT_HISTORY:
		return mvcc.SelectKept
	case datapb.Select_SELECT_CHANGES:
		return mvcc.SelectChanges
	case datapb.Select_SELECT_VERSIONS:
		return mvcc.SelectAll
	case datapb.Select_SELECT_UNSPECIFIED:
	}
	return 0
}
