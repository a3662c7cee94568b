package raftgroup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

const (
	// keptTTL is how long the tables of an interrupted snapshot are kept for the next
	// attempt, which follows within one or two election timeouts. On a full disk they are
	// deleted at once.
	keptTTL = 10 * time.Minute
	// keptCheckInterval lies between two checks for free space. A flush cannot check,
	// because it waits for space itself.
	keptCheckInterval = time.Second
	// keptSnapshotsMax bounds the interrupted snapshots whose tables are kept.
	keptSnapshotsMax = 4
	// keptTablesMax bounds the tables that a receiver lists: 32 GiB with tables of 32
	// MiB. Such a list fits into a message of the bus.
	keptTablesMax = 1024
	// keptUpperMax bounds the keys in that list: a table that ends at a longer key is not
	// kept.
	keptUpperMax = 2 << 10
	// keptTableBytesMin is the minimum size of a table in that list.
	keptTableBytesMin = 2 + sha256.Size
)

// keptTable is a complete table at a receiver. It ends at the physical key upper.
type keptTable struct {
	path  string // at the receiver
	upper []byte
	size  uint64
	sum   [sha256.Size]byte
}

// interruptedSnapshot holds the tables of an interrupted snapshot, for the replica that
// was to receive it.
type interruptedSnapshot struct {
	to     keyspace.ReplicaID
	tables []keptTable
	at     clock.Time
	timer  clock.Timer
}

// encodeHave is the receiver's first message.
func encodeHave(ts []keptTable) []byte {
	b := binary.AppendUvarint([]byte{snapHave}, uint64(len(ts)))
	for i := range ts {
		b = wire.AppendBytes(b, ts[i].upper)
		b = binary.AppendUvarint(b, ts[i].size)
		b = append(b, ts[i].sum[:]...)
	}
	return b
}

// decodeHave decodes what encodeHave wrote. The result refers to b.
func decodeHave(b []byte) ([]keptTable, error) {
	r := wire.NewReader(b)
	if r.Byte() != snapHave {
		return nil, fmt.Errorf("%w: not a table list", errSnapshotFormat)
	}
	ts := make([]keptTable, r.CountUpTo(keptTablesMax, keptTableBytesMin))
	for i := range ts {
		ts[i].upper, ts[i].size = r.BytesUpTo(keptUpperMax), r.Uvarint()
		copy(ts[i].sum[:], r.Fixed(sha256.Size))
	}
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("%w: table list: %w", errSnapshotFormat, err)
	}
	return ts, nil
}

// checksumTable writes a table that the receiver may already have, for its checksum only.
type checksumTable struct {
	x      *outgoingSnapshot
	number int
	want   *keptTable
	cut    []byte
	upper  []byte
	size   uint64
	hash   hash.Hash
}

// Ends implements engine.TableEnder.
func (p *checksumTable) Ends(upper []byte) { p.upper = upper }

// Write implements io.Writer.
func (p *checksumTable) Write(b []byte) (int, error) {
	p.size += uint64(len(b))
	p.x.ctx.progress()
	return p.hash.Write(b)
}

// Close tells the receiver to use its own table, or asks the engine to export the table
// again to be sent.
func (p *checksumTable) Close() error {
	if p.upper == nil {
		return nil // the export has failed
	}
	if !bytes.Equal(p.upper, p.cut) || p.size != p.want.size || [sha256.Size]byte(p.hash.Sum(nil)) != p.want.sum {
		p.x.missed = p.cut
		return engine.ErrOnceMore
	}
	p.x.tables++
	p.x.reused++
	p.x.g.h.m.snapshotReused.Add(float64(p.size))
	p.x.renewPin()
	return p.x.stream.Send(p.x.ctx, binary.AppendUvarint([]byte{snapReuse}, uint64(p.number)))
}

// keep leaves the complete tables of an interrupted snapshot for the next attempt. Tables
// from a malformed stream, or on a full disk, are not kept.
func (r *incomingSnapshot) keep(err error) {
	if errors.Is(err, errSnapshotFormat) || errors.Is(err, engine.ErrNoSpace) || r.room() != nil {
		return
	}
	var kept, left []keptTable
	isKept, ends := make(map[string]bool), make(map[string]bool)
	// The tables of this attempt come first, then those of the previous attempt that this
	// one did not reach.
	for _, t := range append(r.tables, r.have...) {
		if t.path == "" || ends[string(t.upper)] || len(kept) == keptTablesMax || len(t.upper) > keptUpperMax {
			left = append(left, t)
			continue
		}
		kept = append(kept, t)
		isKept[t.path], ends[string(t.upper)] = true, true
	}
	r.have = left
	r.paths = slices.DeleteFunc(r.paths, func(p string) bool { return isKept[p] })
	if len(kept) > 0 {
		r.g.h.snaps.putKept(r.g.id, r.head.to, kept)
	}
}

// reuse takes a table that is here already in place of a sent one.
func (r *incomingSnapshot) reuse(b []byte) error {
	i, w := binary.Uvarint(b)
	if w != len(b) || i >= uint64(len(r.have)) || r.have[i].path == "" || len(r.paths) >= snapshotTablesMax {
		return fmt.Errorf("%w: table %d of %d cannot be reused", errSnapshotFormat, i, len(r.have))
	}
	t := r.have[i]
	r.have[i].path = "" // each at most once
	r.paths, r.tables = append(r.paths, t.path), append(r.tables, t)
	return nil
}

// sumKept checksums the tables of an earlier attempt. It drops tables that cannot be
// read.
func (r *incomingSnapshot) sumKept(ctx context.Context) error {
	fs := r.g.h.cfg.Engine.FS()
	var whole []keptTable
	for _, t := range r.have {
		if err := t.read(ctx, fs); err != nil {
			if ctx.Err() != nil {
				return err
			}
			removeFiles(fs, []keptTable{t})
			continue
		}
		whole = append(whole, t)
	}
	r.have = whole
	return nil
}

// read computes size and checksum of the table.
func (t *keptTable) read(ctx context.Context, fs vfs.FS) (err error) {
	f, err := fs.Open(t.path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	h := sha256.New()
	t.size = 0
	for buf := make([]byte, chunkBytes); ; {
		n, err := f.Read(buf)
		h.Write(buf[:n])
		t.size += uint64(n)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, io.EOF):
			t.sum = [sha256.Size]byte(h.Sum(nil))
			return nil
		case err != nil:
			return err
		}
	}
}

func removeFiles(fs vfs.FS, ts []keptTable) {
	for i := range ts {
		if ts[i].path != "" {
			_ = fs.Remove(ts[i].path) // on failure the engine's next start removes it
		}
	}
}

// putKept keeps tables for the group's next attempt. If there are too many it drops those
// of the oldest interrupted snapshot.
func (s *snapshots) putKept(g keyspace.GroupID, to keyspace.ReplicaID, ts []keptTable) {
	s.forget(g)
	s.mu.Lock()
	if s.mu.kept == nil {
		s.mu.Unlock() // the host has stopped
		return
	}
	var oldest keyspace.GroupID
	for id, k := range s.mu.kept {
		if oldest == 0 || k.at < s.mu.kept[oldest].at {
			oldest = id
		}
	}
	full := len(s.mu.kept) >= keptSnapshotsMax
	k := &interruptedSnapshot{to: to, tables: ts, at: s.h.cfg.Clock.Now()}
	k.timer = s.h.cfg.Clock.AfterFunc(keptCheckInterval, func() { s.expire(g, k) })
	s.mu.kept[g] = k
	s.mu.Unlock()
	if full {
		s.forget(oldest)
	}
}

// expire drops a snapshot's tables when they are too old or the disk is full, and
// otherwise checks again later. It holds mu so that the engine is still open.
func (s *snapshots) expire(g keyspace.GroupID, k *interruptedSnapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.kept[g] != k:
	case s.h.cfg.Clock.Now().Sub(k.at) < keptTTL && s.h.cfg.Engine.Space() != engine.SpaceFull:
		k.timer.Reset(keptCheckInterval)
	default:
		delete(s.mu.kept, g)
		removeFiles(s.h.cfg.Engine.FS(), k.tables)
	}
}

// endKept stops the timers; the engine's next start removes the files.
func (s *snapshots) endKept() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.mu.kept {
		k.timer.Stop()
	}
	s.mu.kept = nil
}

// takeKept removes and returns the tables kept of a group for a replica.
func (s *snapshots) takeKept(g keyspace.GroupID, to keyspace.ReplicaID) []keptTable {
	s.mu.Lock()
	k := s.mu.kept[g]
	if k != nil {
		delete(s.mu.kept, g)
	}
	s.mu.Unlock()
	if k == nil {
		return nil
	}
	k.timer.Stop()
	if k.to != to {
		removeFiles(s.h.cfg.Engine.FS(), k.tables)
		return nil
	}
	return k.tables
}

// forget deletes the tables kept of a group: no replica has the id 0.
func (s *snapshots) forget(g keyspace.GroupID) { s.takeKept(g, 0) }

// forgetAll deletes the tables kept of all groups.
func (s *snapshots) forgetAll() {
	s.mu.Lock()
	var all []keyspace.GroupID
	for g := range s.mu.kept {
		all = append(all, g)
	}
	s.mu.Unlock()
	for _, g := range all {
		s.forget(g)
	}
}
