package mvcc

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// Defaults of RemoveOptions.
const (
	DefaultRemoveVisits  = 10_000
	DefaultRemoveDeletes = 1_000
)

// RemoveOptions say what RemoveOld removes, and how much in one step.
type RemoveOptions struct {
	Span keyspace.Span
	// Compacted is the compacted revision of the span.
	Compacted keyspace.Revision
	// Since is the compacted revision of the last pass over the whole span that is
	// complete and durable, 0 for none. The step then visits only keys that have changed
	// since.
	Since keyspace.Revision
	// Cursor is where the step begins: nil at the start of a pass, then
	// RemoveResult.Cursor.
	Cursor []byte
	// MaxVisits and MaxDeletes end the step, which may exceed them slightly; 0 means the
	// default.
	MaxVisits, MaxDeletes int64
}

// RemoveResult is the outcome of a step.
type RemoveResult struct {
	// Cursor is where the next step begins, or nil when the pass is complete.
	Cursor []byte
	// Visited counts the versions that were read. Removed versions, of Bytes, are deleted
	// by w.
	Visited, Removed, Bytes int64
}

// RemoveOld writes into w the removal of versions that the compaction rule does not keep
// (see the package comment), as r shows them, one bounded step at a time. Steps of one
// pass may be far apart and have increasing compacted revisions: the next pass finds what
// one leaves. Physical removal is each replica's own matter. No read at or above the
// compacted revision depends on it, and no Hash does.
//
// Readers of the span below Compacted must have ended, or hold snapshots.
func RemoveOld(r engine.Reader, w engine.Writer, o RemoveOptions) (RemoveResult, error) {
	if o.MaxVisits <= 0 {
		o.MaxVisits = DefaultRemoveVisits
	}
	if o.MaxDeletes <= 0 {
		o.MaxDeletes = DefaultRemoveDeletes
	}
	if o.Compacted < 1 || o.Since > o.Compacted {
		return RemoveResult{}, nil
	}
	b := engine.VersionedSpan(o.Span)
	p := &remover{o: o, w: w}
	var err error
	// Only versions at or below Compacted matter. Versions at Since matter again, because
	// a tombstone there was kept for watches that begin at Since.
	if p.keys, err = r.NewIter(engine.IterOptions{
		Lower: b.Lower, Upper: b.Upper, Revisions: engine.NewRevisionFilter(o.Since, o.Compacted),
	}); err != nil {
		return RemoveResult{}, fmt.Errorf("mvcc: remove old versions of %s: %w", o.Span, err)
	}
	p.versions = p.keys
	if o.Since > 0 {
		// The filter hides versions that must go: another iterator finds them.
		if p.versions, err = r.NewIter(engine.IterOptions{Lower: b.Lower, Upper: b.Upper}); err != nil {
			err = fmt.Errorf("mvcc: remove old versions of %s: %w", o.Span, err)
			return RemoveResult{}, errors.Join(err, p.keys.Close())
		}
	}
	err = p.run()
	if p.versions != p.keys {
		err = errors.Join(err, p.versions.Close())
	}
	return p.res, errors.Join(err, p.keys.Close())
}

type remover struct {
	o   RemoveOptions
	w   engine.Writer
	res RemoveResult
	// keys finds the user keys that may have something to remove, and versions their
	// versions. Both may be one iterator.
	keys, versions *engine.Iterator

	prefix, seek, tombstone []byte
}

// spent reports whether the step has done its share.
func (p *remover) spent() bool {
	return p.res.Visited >= p.o.MaxVisits || p.res.Removed >= p.o.MaxDeletes
}

func (p *remover) run() error {
	valid, done, err := p.begin()
	for first := true; valid && !done && err == nil; first = false {
		prefix, rev, serr := engine.SplitVersionedKey(p.keys.Key())
		if serr != nil {
			return fmt.Errorf("%w: %w", ErrCorrupt, serr)
		}
		if p.spent() && !first { // every step handles at least one key
			p.res.Cursor = bytes.Clone(prefix)
			return nil
		}
		p.res.Visited++
		p.prefix = append(p.prefix[:0], prefix...)
		switch {
		case rev > p.o.Compacted:
			p.seek = engine.AppendRevision(append(p.seek[:0], prefix...), p.o.Compacted)
			valid = p.keys.SeekGE(p.seek)
			continue
		case rev < p.o.Since:
			// Nothing of this key changed since the last pass; the filter admits
			// neighbours in the same block.
		default:
			if done, err = p.key(); err != nil || done {
				continue
			}
		}
		valid, err = p.leave()
	}
	if err == nil {
		err = p.keys.Error()
	}
	if err != nil {
		return fmt.Errorf("mvcc: remove old versions of %s: %w", p.o.Span, err)
	}
	return nil
}

// begin moves to the start of the step. A cursor with a revision lies within the versions
// of a key of which a newer one is kept: all versions from there on go. done says that
// this alone made up the step.
func (p *remover) begin() (valid, done bool, err error) {
	if p.o.Cursor == nil {
		return p.keys.First(), false, nil
	}
	prefix, _, err := engine.SplitVersionedKey(p.o.Cursor)
	if err != nil {
		return p.keys.SeekGE(p.o.Cursor), false, nil // a prefix: the first version of a key
	}
	p.prefix = append(p.prefix[:0], prefix...)
	if done, err = p.rest(p.versions.SeekGE(p.o.Cursor)); err != nil || done {
		return false, done, err
	}
	p.seek = engine.AppendRevision(append(p.seek[:0], p.prefix...), 0)
	return p.keys.SeekGE(p.seek), false, nil
}

// leave moves keys past the versions of the current user key.
func (p *remover) leave() (bool, error) {
	if !p.keys.Valid() {
		return false, nil
	}
	prefix, _, err := engine.SplitVersionedKey(p.keys.Key())
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if !bytes.Equal(prefix, p.prefix) {
		return true, nil // the same iterator has moved on already
	}
	return p.keys.NextPrefix(), nil
}

// key removes versions of the current user key. keys stands at its newest version at or
// below Compacted, or at an older one. done says that the step ends within the key.
func (p *remover) key() (done bool, err error) {
	valid := true
	if p.versions != p.keys {
		p.seek = engine.AppendRevision(append(p.seek[:0], p.prefix...), p.o.Compacted)
		valid = p.versions.SeekGE(p.seek)
	}
	rev, ok, err := p.here(valid)
	if err != nil || !ok {
		return false, err
	}
	dead := false
	if rev < p.o.Compacted {
		value, err := p.versions.ValueAndErr()
		if err != nil {
			return false, err
		}
		if dead, err = isTombstone(value); err != nil {
			return false, err
		}
	}
	if !dead && !(mutation.Is(mutation.LiveRemoved) && rev < p.o.Compacted) {
		return p.rest(p.versions.Next())
	}
	// The tombstone goes last. If it went while an older version remained, the key would
	// be alive again. A step that ends before that starts with this key again.
	p.tombstone = append(p.tombstone[:0], p.versions.Key()...)
	if done, err = p.rest(p.versions.Next()); err != nil {
		return false, err
	}
	if done {
		p.res.Cursor = bytes.Clone(p.prefix)
		return true, nil
	}
	return false, p.remove(p.tombstone, 1)
}

// rest removes the versions of the current user key from the position of versions on, at
// least one.
func (p *remover) rest(valid bool) (done bool, err error) {
	for first := true; ; first = false {
		_, ok, err := p.here(valid)
		if err != nil || !ok {
			return false, err
		}
		key, value := p.versions.Key(), p.versions.LazyValue() // its length needs no read
		if p.spent() && !first {
			p.res.Cursor = bytes.Clone(key)
			return true, nil
		}
		p.res.Visited++
		if err := p.remove(key, value.Len()); err != nil {
			return false, err
		}
		valid = p.versions.Next()
	}
}

// here reports whether versions stands on a version of the current user key.
func (p *remover) here(valid bool) (rev keyspace.Revision, ok bool, err error) {
	if !valid {
		return 0, false, p.versions.Error()
	}
	prefix, rev, err := engine.SplitVersionedKey(p.versions.Key())
	if err != nil {
		return 0, false, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return rev, bytes.Equal(prefix, p.prefix), nil
}

// remove deletes the version with the physical key and a value of that many bytes.
func (p *remover) remove(key []byte, valueBytes int) error {
	p.res.Removed++
	p.res.Bytes += int64(len(key)) + int64(valueBytes)
	return p.w.Delete(key)
}
