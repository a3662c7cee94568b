package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/backup"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
)

// RestoreOptions say which state becomes a new cluster.
type RestoreOptions struct {
	// Source is the cluster whose backups are read, 0 for the only one.
	Source keyspace.ClusterID
	// When is the state; the zero value is the newest backup's.
	When backup.When
	// Bump is added to the revision, and what lies below is compacted. Clients have seen more of the lost cluster than
	// its backup has. With 0 history and revision are kept.
	Bump keyspace.Revision
	// TempDir is for merging more than 64 backups: up to the size of all but the full one. Empty is the system's.
	TempDir string
	// WithoutAuth leaves users and roles out.
	WithoutAuth bool
}

// DefaultBump is what a restore adds to the revision: more than a cluster writes between two backups.
const DefaultBump = 1_000_000_000

// Restore makes a new cluster what a backup is.
func Restore(ctx context.Context, c *Cluster, r *backup.Repository, o RestoreOptions) error {
	if o.Bump < 0 {
		return fmt.Errorf("the revision cannot be lowered, by %d: clients have seen it", -o.Bump)
	}
	p, err := r.Plan(ctx, o.Source, o.When)
	if err != nil {
		return err
	}
	p.TempDir = o.TempDir
	if p.Revision > keyspace.MaxRevision-o.Bump {
		return fmt.Errorf("revision %d cannot be raised by %d: the last one is %d", p.Revision, o.Bump, keyspace.MaxRevision)
	}
	c.Report("cluster %s, chain %s, %d backups: revision %d, history from %d on", p.Cluster, p.Chain, len(p.Manifests), p.Revision, p.Compacted)
	l := load{
		name:     fmt.Sprintf("backup of cluster %s at revision %d", p.Cluster, p.Revision),
		identity: fmt.Sprintf("backup %s %s at revision %d, bump %d", p.Cluster, p.Chain, p.Revision, o.Bump),
		lost:     true, revision: p.Revision + o.Bump, compacted: max(p.Compacted, 0), versions: r.Versions(ctx, p, keyspace.Span{}),
	}
	if o.Bump > 0 {
		l.compacted = l.revision
	}
	for _, lease := range p.Leases {
		l.leases = append(l.leases, dataapi.LoadLease{ID: lease.ID, TTL: lease.TTLSeconds})
	}
	if !o.WithoutAuth && len(p.Users) > 0 {
		if l.access, err = decodeUsers(p.Users); err != nil {
			return err
		}
	}
	return l.run(ctx, c)
}

// putsAtOnce is how many puts RestoreAsNew has under way.
const putsAtOnce = 16

// RestoreAsNew puts the keys with a prefix into a living cluster, with the values that they have in a backup: as ordinary puts, with
// new revisions and without their leases. A key that has its value stays as it is, and so do other keys, also those with the prefix that
// the backup does not have. Of the options only Source, When and TempDir count. After an error it may be called again.
func RestoreAsNew(ctx context.Context, c *Cluster, r *backup.Repository, o RestoreOptions, prefix string) error {
	p, err := r.Plan(ctx, o.Source, o.When)
	if err != nil {
		return err
	}
	p.TempDir = o.TempDir
	span := keyspace.Span{Start: []byte(prefix)}
	if end := clientv3.GetPrefixRangeEnd(prefix); end != "\x00" {
		span.End = []byte(end)
	}
	g, putting := errgroup.WithContext(ctx)
	g.SetLimit(putsAtOnce)
	var last []byte // the newest version of a key comes first
	keys := 0
	var puts, leased atomic.Int64
	for v, err := range r.Versions(ctx, p, span) {
		if err != nil {
			return errors.Join(err, g.Wait())
		}
		if putting.Err() != nil {
			break
		}
		if last != nil && bytes.Equal(v.Key, last) {
			continue
		}
		if last = append(last[:0], v.Key...); v.Tombstone {
			continue
		}
		keys++
		key, value, lease := string(v.Key), string(v.Value), v.Lease
		g.Go(func() error {
			a, err := c.Client.Txn(putting).If(clientv3.Compare(clientv3.Value(key), "=", value)).Else(clientv3.OpPut(key, value)).Commit()
			switch {
			case err != nil:
				return fmt.Errorf("put key %.200q: %w", key, err)
			case a.Succeeded:
				return nil
			case lease != 0:
				leased.Add(1)
			}
			puts.Add(1)
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil { // the loop may have ended for it with no put under way
		return err
	}
	c.Report("put %d of %d keys as they were at revision %d of cluster %s, and the others are so; %d had a lease, and have none now",
		puts.Load(), keys, p.Revision, p.Cluster, leased.Load())
	return nil
}
