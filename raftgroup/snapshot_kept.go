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
	// keptTTL is how long the tables of a copy that was cut are kept for the next attempt,
	// which follows within an election timeout or two. Where the disk is full they go at once.
	keptTTL = 10 * time.Minute
	// keptLook lies between two looks whether there is room for them. Whoever flushes cannot
	// look: it waits for room itself.
	keptLook = time.Second
	// keptCopiesMax bounds the copies of which tables are kept.
	keptCopiesMax = 4
	// keptTablesMax bounds the tables of which a receiver speaks: with tables of 32 MiB those
	// of 32 GiB. They fit into a message of the bus.
	keptTablesMax = 1024
	// keptUpperMax bounds the keys in that message: a table that ends at a longer one is not
	// kept.
	keptUpperMax = 2 << 10
	// keptTableBytesMin is the least that a table takes in that message.
	keptTableBytesMin = 2 + sha256.Size
)

// keptTable is a table that a receiver has. It ends at the physical key upper.
type keptTable struct {
	path  string // at the receiver
	upper []byte
	size  uint64
	sum   [sha256.Size]byte
}

// keptCopy are the tables of a copy that was cut, for the replica that asked for it.
type keptCopy struct {
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

// decodeHave reads what encodeHave wrote. What it returns points into b.
func decodeHave(b []byte) ([]keptTable, error) {
	r := wire.NewReader(b)
	if r.Byte() != snapHave {
		return nil, fmt.Errorf("%w: not what the receiver has", errSnapshotFormat)
	}
	ts := make([]keptTable, r.CountUpTo(keptTablesMax, keptTableBytesMin))
	for i := range ts {
		ts[i].upper, ts[i].size = r.BytesUpTo(keptUpperMax), r.Uvarint()
		copy(ts[i].sum[:], r.Fixed(sha256.Size))
	}
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("%w: what the receiver has: %w", errSnapshotFormat, err)
	}
	return ts, nil
}

// probe takes a table that the receiver may have, for its checksum.
type probe struct {
	x      *sending
	number int
	want   *keptTable
	cut    []byte
	upper  []byte
	size   uint64
	hash   hash.Hash
}

// Ends implements engine.TableEnder.
func (p *probe) Ends(upper []byte) { p.upper = upper }

// Write implements io.Writer.
func (p *probe) Write(b []byte) (int, error) {
	p.size += uint64(len(b))
	p.x.ctx.progress()
	return p.hash.Write(b)
}

// Close says that the receiver is to use its table, or asks for the table to be sent.
func (p *probe) Close() error {
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

// keep leaves the whole tables of a copy that was cut for the next attempt. They are not
// worth much where they were malformed, or the disk is full.
func (r *receive) keep(err error) {
	if errors.Is(err, errSnapshotFormat) || errors.Is(err, engine.ErrNoSpace) || r.room() != nil {
		return
	}
	var kept, left []keptTable
	isKept, ends := make(map[string]bool), make(map[string]bool)
	// Behind those of this attempt come those of the one before that it has not come to.
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

// reuse takes a table that was here already instead of one that comes.
func (r *receive) reuse(b []byte) error {
	i, w := binary.Uvarint(b)
	if w != len(b) || i >= uint64(len(r.have)) || r.have[i].path == "" || len(r.paths) >= snapshotTablesMax {
		return fmt.Errorf("%w: table %d of %d is to be used again", errSnapshotFormat, i, len(r.have))
	}
	t := r.have[i]
	r.have[i].path = "" // once
	r.paths, r.tables = append(r.paths, t.path), append(r.tables, t)
	return nil
}

// sumKept reads what an earlier attempt has left. What cannot be read is not spoken of.
func (r *receive) sumKept(ctx context.Context) error {
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

// read takes size and checksum of the table.
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
			_ = fs.Remove(ts[i].path) // or the engine's next start does
		}
	}
}

// putKept keeps tables for the group's next attempt, instead of those of the copy that
// was kept longest where there are too many.
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
	full := len(s.mu.kept) >= keptCopiesMax
	k := &keptCopy{to: to, tables: ts, at: s.h.cfg.Clock.Now()}
	k.timer = s.h.cfg.Clock.AfterFunc(keptLook, func() { s.expire(g, k) })
	s.mu.kept[g] = k
	s.mu.Unlock()
	if full {
		s.forget(oldest)
	}
}

// expire forgets a copy for which nobody has come, or for which there is no room any more,
// and else looks again. Under mu, so that the engine is there.
func (s *snapshots) expire(g keyspace.GroupID, k *keptCopy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.kept[g] != k:
	case s.h.cfg.Clock.Now().Sub(k.at) < keptTTL && s.h.cfg.Engine.Space() != engine.SpaceFull:
		k.timer.Reset(keptLook)
	default:
		delete(s.mu.kept, g)
		removeFiles(s.h.cfg.Engine.FS(), k.tables)
	}
}

// endKept stops the timers; the files are left to the engine's next start.
func (s *snapshots) endKept() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.mu.kept {
		k.timer.Stop()
	}
	s.mu.kept = nil
}

// takeKept returns the tables that are kept of a group for a replica.
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

// forget removes what is kept of a group: no replica has the id 0.
func (s *snapshots) forget(g keyspace.GroupID) { s.takeKept(g, 0) }

// forgetAll removes what is kept of all groups.
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
