package node

import (
	"context"
	"errors"
	"fmt"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/placement"
)

// Entry is the way of a node without ports into a cluster: what Start does between a
// configuration and Open, over a network that is the caller's.
type Entry struct {
	// Config says name, peer URLs and directories, and how the node comes in: by --join, by
	// --initial-cluster-state existing, or as a founder.
	Config *config.Config
	// Ask asks the admin service of one of the nodes of --join to let this one in. What is no
	// *adminapi.Refusal is asked again.
	Ask func(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error)
	// Tell asks the node at a peer address, HOST:PORT, for what its Core.Told says.
	Tell func(ctx context.Context, addr string) ([]byte, error)
}

// Find finds the node's place and writes it into the options: cluster, own id, founders, and
// whom to ask for the node table. It waits until somebody has answered or ctx ends; a refusal
// is for good.
func (e *Entry) Find(ctx context.Context, o *Options) error {
	seat, err := e.placer(o).find(ctx)
	if err != nil {
		return err
	}
	seat.into(o)
	return nil
}

// into writes the place into the options.
func (l *place) into(o *Options) {
	o.Cluster, o.Self, o.Founders, o.Peers = l.cluster, l.self, l.founders, l.peers
}

func (e *Entry) placer(o *Options) *placer {
	p := &placer{cfg: e.Config, fs: o.FS, clock: o.Clock, log: o.Logger, tell: e.Tell}
	p.ask = func(ctx context.Context, who engine.Identity) (*joined, error) {
		a, err := e.Ask(ctx, joinRequest(e.Config.Name, texts(e.Config.AdvertisePeerURLs), who))
		if r := (*adminapi.Refusal)(nil); err != nil && (!errors.As(err, &r) || r.Later) {
			return nil, fmt.Errorf("%w: %w", errLater, err)
		}
		if err != nil {
			return nil, err
		}
		return joinedOf(a)
	}
	return p
}

// Announce publishes the node's row of the node table, with where it serves clients, until
// it is there or ctx ends. A node that was removed from the cluster cannot go on.
func (c *Core) Announce(ctx context.Context, row placement.Node) { c.announce(ctx, row) }

// Admin answers operators' questions about the whole cluster, and does what they ask for.
func (c *Core) Admin() adminapi.Backend { return admin{c} }

// Members answers etcd's questions about the members, and changes them; there are at most so
// many learners.
func (c *Core) Members(maxLearners int) etcdapi.Cluster { return members{c, maxLearners} }

// Told is what the node says to one that asks at its peer address who the cluster's nodes
// are; nothing before it knows any.
func (c *Core) Told() []byte { return c.told() }
