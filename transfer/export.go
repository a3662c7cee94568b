package transfer

import (
	"context"
	"errors"

	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
)

// ExportOptions say what file of etcd's is written.
type ExportOptions struct {
	// Path is the file. Nothing may have that name.
	Path string
	// Revision is that of the state, 0 for the current one.
	Revision keyspace.Revision
	// EtcdVersion is the oldest etcd that is to restore the file, MaxBytes its largest size; empty and 0 are etcdfile's
	// defaults.
	EtcdVersion etcdfile.EtcdVersion
	MaxBytes    int64
	// TempDir is for sorting: up to the size of the data. Empty is the system's.
	TempDir string
}

// Exported says what was written.
type Exported struct {
	etcdfile.Stats
	Revision, Compacted keyspace.Revision
}

// Export writes the cluster's keys with their history, leases, users and roles as a file that etcdutl restores.
func Export(ctx context.Context, c *Cluster, o ExportOptions) (done Exported, err error) {
	t := c.teller()
	read := int64(0)
	h, sorter, err := dataapi.Collect(ctx, dataapi.NewClient(c.Client.ActiveConnection(), c.Clock), dataapi.CollectOptions{
		Cut: dataapi.CutOptions{Kind: dataapi.KindExport, Owner: owner()}, Revision: o.Revision,
		EtcdVersion: o.EtcdVersion, MaxBytes: o.MaxBytes, TempDir: o.TempDir, Clock: c.Clock,
		Began: func(h *etcdfile.Header) { c.Report("reading revision %d, compacted at %d", h.Revision, h.Compacted) },
		Look: func() error {
			read += dataapi.LookBytes
			t.say("%d MiB of keys and values read", read>>20)
			return nil
		},
		Again: func(err error) {
			read = 0
			c.Report("reading begins anew, since a compaction came before the hold: %v", err)
		},
	})
	if err != nil {
		return done, err
	}
	defer sorter.Close()
	c.Report("writing %d bytes of keys and values", h.DataBytes)
	w, err := etcdfile.Create(o.Path, *h)
	if err != nil {
		return done, err
	}
	err = w.AddAll(ctx, sorter)
	if err == nil {
		done.Stats, err = w.Finish(ctx)
	}
	if err != nil {
		return Exported{}, errors.Join(err, w.Abort())
	}
	done.Revision, done.Compacted = h.Revision, h.Compacted
	return done, nil
}
