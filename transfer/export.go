package transfer

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
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
	client, cut, held, stop, err := c.cut(ctx, dataapi.CutOptions{Owner: "export to etcd"})
	if err != nil {
		return done, err
	}
	defer stop()
	h, err := exportHeader(cut, &o)
	if err != nil {
		return done, err
	}
	c.Report("reading revision %d, compacted at %d", h.Revision, h.Compacted)
	sorter := etcdfile.NewSorter(etcdfile.SorterOptions{Order: etcdfile.ByRevision, TempDir: o.TempDir, Compacted: h.Compacted})
	defer sorter.Close()
	vs := client.Read(held, dataapi.ReadOptions{Cut: mvcc.Cut{Select: mvcc.SelectKept, At: h.Revision, After: h.Compacted}})
	defer vs.Close()
	if err := collect(vs, &h, sorter); err != nil {
		return done, err
	}
	c.Report("writing %d versions, %d bytes of keys and values", vs.Sum().Versions, vs.Sum().Bytes)
	w, err := etcdfile.Create(o.Path, h)
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

// exportHeader is what the file has beside versions.
func exportHeader(cut *dataapi.Cut, o *ExportOptions) (h etcdfile.Header, err error) {
	compacted := max(cut.Compacted, 0)
	at := cmp.Or(o.Revision, max(cut.Revision, 1))
	if at > max(cut.Revision, 1) || at < max(compacted, 1) {
		return h, fmt.Errorf("revision %d cannot be exported: the cluster has the revisions %d to %d", at, max(compacted, 1), cut.Revision)
	}
	access, err := fsm.AccessOf(cut.Access)
	if err != nil {
		return h, fmt.Errorf("users and roles of the cut: %w", err)
	}
	h = etcdfile.Header{Revision: at, Compacted: compacted, EtcdVersion: o.EtcdVersion, Auth: etcdfile.AuthOf(access), MaxBytes: o.MaxBytes}
	for _, l := range cut.Leases {
		h.Leases = append(h.Leases, etcdfile.Lease{ID: l.ID, TTLSeconds: l.TTL, RemainingSeconds: max(int64(l.Remaining/time.Second), 1)})
	}
	return h, nil
}

// collect gives all versions to the sorter, and the header a lease for keys of one that was revoked around the cut
// (trap 119).
func collect(vs *dataapi.Versions, h *etcdfile.Header, sorter *etcdfile.Sorter) error {
	known := map[keyspace.LeaseID]bool{}
	for _, l := range h.Leases {
		known[l.ID] = true
	}
	var last []byte
	for {
		v, err := vs.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if v.Lease != 0 && !known[v.Lease] && !bytes.Equal(last, v.Key) {
			known[v.Lease] = true
			h.Leases = append(h.Leases, etcdfile.Lease{ID: v.Lease, TTLSeconds: int64(dataapi.LostLeaseTTL / time.Second), RemainingSeconds: int64(dataapi.LostLeaseTTL / time.Second)})
		}
		last = append(last[:0], v.Key...)
		h.DataBytes += v.Size()
		if err := sorter.Add(v); err != nil {
			return err
		}
	}
	slices.SortFunc(h.Leases, func(a, b etcdfile.Lease) int { return cmp.Compare(a.ID, b.ID) })
	return nil
}
