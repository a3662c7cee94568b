package lease

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
)

// Gateway answers etcd's Lease service on any node. Headers hold revisions alone. Errors
// are kverrors or contexts' errors. The callers bound the calls in time.
type Gateway struct {
	client *placement.Client
	keys   Revoker
	clock  clock.Clock
}

// NewGateway returns a node's Gateway.
func NewGateway(c *placement.Client, keys Revoker, clk clock.Clock) *Gateway {
	return &Gateway{client: c, keys: keys, clock: clk}
}

// Grant implements etcdapi.Leases.
func (g *Gateway) Grant(ctx context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	id, drawn := keyspace.LeaseID(r.GetID()), false
	for id == 0 {
		var err error
		if id, err = drawID(); err != nil {
			return nil, err
		}
		drawn = true
	}
	ttl, rev, err := g.client.GrantLease(ctx, id, r.GetTTL(), drawn)
	if err != nil {
		return nil, err
	}
	return &pb.LeaseGrantResponse{Header: header(rev), ID: int64(id), TTL: ttl}, nil
}

// drawID draws an id that nobody has, at random, not negative.
func drawID() (keyspace.LeaseID, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return 0, fmt.Errorf("draw a lease id: %w", err)
	}
	return keyspace.LeaseID(binary.BigEndian.Uint64(b[:]) >> 1), nil
}

func header(rev keyspace.Revision) *pb.ResponseHeader {
	return &pb.ResponseHeader{Revision: int64(rev)}
}

// A revoke whose keys are written meanwhile is tried again after a pause, which doubles each time from the first one to
// the last one: each try is two entries of the placement group's log.
const firstRevokePause, lastRevokePause = 10 * time.Millisecond, time.Second

// Revoke implements etcdapi.Leases. It begins anew where a key of the lease is written between the check and the
// deletion, after a pause that grows.
func (g *Gateway) Revoke(ctx context.Context, r *pb.LeaseRevokeRequest, check func(keys [][]byte) error) (*pb.LeaseRevokeResponse, error) {
	if check == nil {
		rev, err := g.client.RevokeLease(ctx, keyspace.LeaseID(r.GetID()))
		if err != nil {
			return nil, err
		}
		return &pb.LeaseRevokeResponse{Header: header(rev)}, nil
	}
	for pause := firstRevokePause; ; pause = min(2*pause, lastRevokePause) {
		info, err := g.client.LookLease(ctx, keyspace.LeaseID(r.GetID()))
		if err != nil {
			return nil, err
		}
		if info.Phase == placement.LeaseGone {
			return nil, kverror.LeaseNotFound
		}
		var keys [][]byte
		if len(info.Spans) > 0 {
			if keys, _, err = g.keys.LeaseKeys(ctx, info.ID, info.Spans); err != nil {
				return nil, err
			}
		}
		if err := check(keys); err != nil {
			return nil, err
		}
		// The keys are all that the lease had at the revision of the look, or more. A span that was registered later has
		// only keys of later revisions.
		rev, err := g.client.RevokeLeaseChecked(ctx, info.LeaseRef, info.Revision)
		if err == nil {
			return &pb.LeaseRevokeResponse{Header: header(rev)}, nil
		}
		if !errors.Is(err, kverror.KeysChanged) || clock.Sleep(ctx, g.clock, pause) != nil {
			return nil, err
		}
	}
}

// KeepAlive implements etcdapi.Leases.
func (g *Gateway) KeepAlive(ctx context.Context, r *pb.LeaseKeepAliveRequest) (*pb.LeaseKeepAliveResponse, error) {
	ttl, rev, err := g.client.KeepLeaseAlive(ctx, keyspace.LeaseID(r.GetID()))
	if err != nil {
		return nil, err
	}
	return &pb.LeaseKeepAliveResponse{Header: header(rev), ID: r.GetID(), TTL: ttl}, nil
}

// TimeToLive implements etcdapi.Leases. If the request wants keys, the lease is alive
// before and after they are read.
func (g *Gateway) TimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	info, err := g.client.LookLease(ctx, keyspace.LeaseID(r.GetID()))
	if err != nil {
		return nil, err
	}
	var keys [][]byte
	if r.GetKeys() && len(info.Spans) > 0 {
		var rev keyspace.Revision
		if keys, rev, err = g.keys.LeaseKeys(ctx, info.ID, info.Spans); err != nil {
			return nil, err
		}
		ref := info.LeaseRef
		if info, err = g.client.LookLease(ctx, info.ID); err != nil {
			return nil, err
		}
		if info.LeaseRef != ref {
			return gone(r.GetID(), info.Revision), nil // another has its id by now
		}
		info.Revision = max(info.Revision, rev)
	}
	if info.Phase == placement.LeaseGone {
		return gone(r.GetID(), info.Revision), nil
	}
	return &pb.LeaseTimeToLiveResponse{
		Header: header(info.Revision), ID: r.GetID(), TTL: int64(info.Remaining.Seconds()), GrantedTTL: info.TTL, Keys: keys,
	}, nil
}

func gone(id int64, rev keyspace.Revision) *pb.LeaseTimeToLiveResponse {
	return &pb.LeaseTimeToLiveResponse{Header: header(rev), ID: id, TTL: -1}
}

// Leases implements etcdapi.Leases.
func (g *Gateway) Leases(ctx context.Context, _ *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	all, rev, err := g.client.ListLeases(ctx)
	if err != nil {
		return nil, err
	}
	resp := &pb.LeaseLeasesResponse{Header: header(rev), Leases: make([]*pb.LeaseStatus, len(all))}
	for i := range all {
		resp.Leases[i] = &pb.LeaseStatus{ID: int64(all[i].ID)}
	}
	return resp, nil
}
