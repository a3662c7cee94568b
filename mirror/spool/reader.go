package spool

import (
	"context"
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// Reader reads a spool from a revision on. One goroutine uses it.
type Reader struct {
	s     *Spool
	after keyspace.Revision
	f     vfs.File
	sc    scan
	mark  position
}

// position is where a record begins.
type position struct {
	seq uint64
	at  int64
}

// NewReader returns a Reader of the revisions above after. They must not have been dropped.
func (s *Spool) NewReader(after keyspace.Revision) (*Reader, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.segments[0]
	if after < first.after {
		return nil, fmt.Errorf("spool %s: it begins at revision %d, and revision %d is next", s.o.Dir, first.after+1, after+1)
	}
	from := first
	for _, g := range s.segments {
		if g.after <= after {
			from = g
		}
	}
	return &Reader{s: s, after: after, sc: scan{seq: from.seq, at: headerBytes}}, nil
}

// Next returns the next record, and waits for one if there is none. Its bytes are valid
// until the next call. The error is ErrClosed if the spool was closed, or that of ctx.
func (r *Reader) Next(ctx context.Context) (Record, error) {
	for {
		ready, changed, err := r.position()
		if err != nil {
			return Record{}, err
		}
		if !ready {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				return Record{}, ctx.Err()
			}
		}
		at := position{r.sc.seq, r.sc.at}
		rec, err := r.sc.next()
		if err != nil {
			return Record{}, fmt.Errorf("spool %s: read %s: offset %d: %w", r.s.o.Dir, segmentName(at.seq), at.at, err)
		}
		if rec.Revision <= r.after {
			continue
		}
		if !rec.End && rec.Events[0].Sub == 0 {
			r.mark = at
		}
		return rec, nil
	}
}

// position says whether there is something to read, and goes to the next segment at the end
// of one.
func (r *Reader) position() (ready bool, changed <-chan struct{}, err error) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if r.s.closed {
		return false, nil, ErrClosed
	}
	for _, g := range r.s.segments {
		if g.seq < r.sc.seq {
			continue
		}
		if g.seq > r.sc.seq {
			r.close()
			r.sc = scan{seq: g.seq, at: headerBytes}
		}
		if r.sc.at == g.end {
			continue
		}
		if r.f == nil {
			if r.f, err = r.s.o.FS.Open(r.s.path(g.seq)); err != nil {
				return false, nil, fmt.Errorf("spool %s: %w", r.s.o.Dir, err)
			}
			r.sc.f = r.f
		}
		r.sc.size = g.end
		return true, nil, nil
	}
	return false, r.s.changed, nil
}

// Ready says whether Next would return without waiting. It may also say so before the first
// record was read.
func (r *Reader) Ready() bool {
	ready, _, err := r.position()
	return ready || err != nil
}

// Rewind goes back to the first piece of the revision that was read last. It must not have
// been dropped.
func (r *Reader) Rewind() {
	if r.mark.seq != r.sc.seq {
		panic(fmt.Sprintf("spool: a revision begins in segment %x and is read in %x", r.mark.seq, r.sc.seq))
	}
	r.sc.at = r.mark.at
}

func (r *Reader) close() {
	if r.f != nil {
		r.f.Close()
		r.f = nil
	}
}

// Close closes the Reader's file.
func (r *Reader) Close() { r.close() }
