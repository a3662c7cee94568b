package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"path/filepath"
	"slices"

	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// ImportOptions say what is imported of a file.
type ImportOptions struct {
	// Path is a file that etcdctl snapshot save has written, or with SkipHashCheck an etcd's member/snap/db.
	Path          string
	SkipHashCheck bool
	// Latest leaves history out. WithoutAuth leaves users and roles out.
	Latest, WithoutAuth bool
	// TempDir is for sorting: up to 1.2 times the size of the data. Empty is the system's.
	TempDir string
	// MaxVersionBytes bounds key and value of one version. 0 is what nodes take by their defaults.
	MaxVersionBytes int64
}

// maxVersionBytes is what a node takes by its defaults (--max-request-bytes).
const maxVersionBytes = 3 << 19

// Import makes a new cluster what a file of etcd's is.
func Import(ctx context.Context, c *Cluster, o ImportOptions) error {
	l, done, err := loadOfFile(ctx, c, &o)
	if err != nil {
		return err
	}
	defer done()
	return l.run(ctx, c)
}

// withAdvice says what to do about versions that are too large.
func withAdvice(err error) error {
	var large *etcdfile.TooLargeVersionsError
	if !errors.As(err, &large) {
		return err
	}
	const smaller = "make these values smaller in etcd, or delete the keys, and take the snapshot again. An import leaves old versions out by --history latest"
	most := slices.MaxFunc(large.Versions, func(a, b etcdfile.TooLargeVersion) int { return cmp.Compare(a.Bytes, b.Bytes) }).Bytes
	switch {
	case most > rangeapi.MaxRequestBytes:
		return fmt.Errorf("%w. No cluster takes more than %d bytes: %s", err, rangeapi.MaxRequestBytes, smaller)
	case large.More:
		return fmt.Errorf("%w. Raise --max-version-bytes, and with it --max-request-bytes of all nodes, to %d at most; or %s", err, rangeapi.MaxRequestBytes, smaller)
	}
	return fmt.Errorf("%w. Raise --max-version-bytes to %d, and to as much --max-request-bytes of all nodes; or %s", err, most, smaller)
}

// loadOfFile is the load that a file of etcd's makes. done closes the file.
func loadOfFile(ctx context.Context, c *Cluster, o *ImportOptions) (l *load, done func(), err error) {
	db, err := etcdfile.Open(ctx, o.Path, etcdfile.Options{SkipHashCheck: o.SkipHashCheck})
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			db.Close()
		}
	}()
	info := db.Info()
	c.Report("%s: revision %d, compacted at %d, %d leases, %d users", o.Path, info.Revision, info.Compacted, len(info.Leases), len(info.Auth.Users))
	largest := min(cmp.Or(o.MaxVersionBytes, maxVersionBytes), rangeapi.MaxRequestBytes)
	vs, err := db.Versions(ctx, etcdfile.ReadOptions{Latest: o.Latest, MaxVersionBytes: largest, TempDir: o.TempDir})
	if err != nil {
		return nil, nil, withAdvice(err)
	}
	defer func() {
		if err != nil {
			vs.Close()
		}
	}()
	name := filepath.Base(o.Path)
	l = &load{
		name:     "etcd's file " + name,
		identity: fmt.Sprintf("etcd file %s at revision %d, compacted %d, raft index %d, %d bytes, latest %t", name, info.Revision, info.Compacted, info.ConsistentIndex, info.Bytes, o.Latest),
		revision: info.Revision, compacted: vs.Compacted(), versions: fromFile(vs),
	}
	for _, lease := range info.Leases {
		l.leases = append(l.leases, dataapi.LoadLease{ID: lease.ID, TTL: lease.TTLSeconds})
	}
	if !o.WithoutAuth && len(info.Auth.Users)+len(info.Auth.Roles) > 0 {
		if l.access, err = info.Auth.Rights(); err != nil {
			return nil, nil, fmt.Errorf("users and roles of %s: %w", o.Path, err)
		}
	}
	return l, func() {
		vs.Close()
		db.Close()
	}, nil
}

// fromFile are the versions of a file.
func fromFile(vs *etcdfile.Versions) iter.Seq2[*mvcc.Version, error] {
	return func(yield func(*mvcc.Version, error) bool) {
		for {
			v, err := vs.Next()
			if errors.Is(err, io.EOF) || !yield(v, err) || err != nil {
				return
			}
		}
	}
}
