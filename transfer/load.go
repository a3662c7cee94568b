package transfer

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rights"
)

// A load is a store that a new cluster becomes.
type load struct {
	// name says for people where the store comes from. identity is the same when the load is begun again.
	name, identity string
	// revision is the last one, compacted that up to which history may be missing, 0 for none.
	revision, compacted keyspace.Revision
	leases              []dataapi.LoadLease
	// versions are by key, the newest of a key first. They are read once.
	versions iter.Seq2[*mvcc.Version, error]
	// access is nil for none.
	access *rights.State
	// lost says that a key may have a lease that is not among them: it was granted and revoked around the state, or
	// between two backups. Such a key gets a lease of dataapi.LostLeaseTTL (trap 119).
	lost bool
}

// splitBytes is after how many bytes of keys and values another range begins. Ranges split by themselves at twice as
// many, and a range that is loaded would do so again and again.
const splitBytes = 128 << 20

// run loads the store into the cluster.
func (l *load) run(ctx context.Context, c *Cluster) error {
	loader := dataapi.NewLoader(dataapi.LoaderOptions{
		Conn: c.Client.ActiveConnection(), Clock: c.Clock, Number: max(1, xxhash.Sum64String(l.identity)), Source: l.name,
	})
	p, err := l.bring(ctx, c, loader)
	if err != nil {
		return err
	}
	if p == nil {
		return nil
	}
	if err := bringAccess(ctx, c, loader, l.access); err != nil {
		return err
	}
	if err := loader.Finish(ctx, l.revision, l.compacted); err != nil {
		return fmt.Errorf("finish the load: %w", err)
	}
	c.Report("%d versions, %d bytes of keys and values: the cluster serves from revision %d on", p.versions, p.bytes, l.revision)
	return nil
}

// bringAccess brings users and roles, nil for none.
func bringAccess(ctx context.Context, c *Cluster, loader *dataapi.Loader, s *rights.State) error {
	if err := loader.Access(ctx, s); err != nil {
		return fmt.Errorf("users and roles: %w", err)
	}
	if s != nil {
		c.Report("%d users, %d roles; they are checked: %t", len(s.Users()), len(s.Roles()), s.Enabled)
	}
	return nil
}

// bring begins the load and brings leases and versions. It returns nil for a load that had finished before.
func (l *load) bring(ctx context.Context, c *Cluster, loader *dataapi.Loader) (*progress, error) {
	st, err := loader.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("begin the load: %w", err)
	}
	if st.GetPhase() == datapb.LoadPhase_LOAD_FINISHED {
		c.Report("the load had finished before, and the cluster serves from revision %d on", st.GetPosition())
		return nil, nil
	}
	if err := loader.Leases(ctx, l.leases, nil); err != nil {
		return nil, fmt.Errorf("grant %d leases: %w", len(l.leases), err)
	}
	p := &progress{teller: c.teller(), loader: loader}
	if l.lost {
		p.granted = map[keyspace.LeaseID]bool{}
		for _, lease := range l.leases {
			p.granted[lease.ID] = true
		}
	}
	if err := loader.Bulk(ctx, p.through(ctx, l.versions)); err != nil {
		return nil, fmt.Errorf("load: %w", err)
	}
	return p, nil
}

// tellEvery is after how many versions the clock is looked at.
const tellEvery = 64

// progress counts what passes, and has ranges begin in it.
type progress struct {
	*teller
	loader          *dataapi.Loader
	versions, bytes int64
	sinceBorder     int64
	key             []byte
	// granted are the leases that there are, nil if no lease is granted for keys of others.
	granted map[keyspace.LeaseID]bool
}

func (p *progress) through(ctx context.Context, versions iter.Seq2[*mvcc.Version, error]) iter.Seq2[*mvcc.Version, error] {
	return func(yield func(*mvcc.Version, error) bool) {
		for v, err := range versions {
			if err == nil {
				err = p.pass(ctx, v)
			}
			if !yield(v, err) || err != nil {
				return
			}
		}
	}
}

func (p *progress) pass(ctx context.Context, v *mvcc.Version) error {
	if p.sinceBorder >= splitBytes && string(p.key) != string(v.Key) {
		if err := p.loader.Split(ctx, [][]byte{v.Key}); err != nil {
			return fmt.Errorf("have a range begin at key %q: %w", v.Key, err)
		}
		p.sinceBorder = 0
	}
	if p.granted != nil && v.Lease != 0 && !p.granted[v.Lease] && string(p.key) != string(v.Key) {
		p.granted[v.Lease] = true
		if err := p.loader.Leases(ctx, []dataapi.LoadLease{{ID: v.Lease, TTL: int64(dataapi.LostLeaseTTL / time.Second)}}, nil); err != nil {
			return fmt.Errorf("grant lease %x of key %q: %w", int64(v.Lease), v.Key, err)
		}
	}
	p.key = append(p.key[:0], v.Key...)
	p.versions, p.bytes, p.sinceBorder = p.versions+1, p.bytes+v.Size(), p.sinceBorder+v.Size()
	if p.versions%tellEvery == 0 {
		p.say("%d versions, %d bytes of keys and values", p.versions, p.bytes)
	}
	return nil
}
