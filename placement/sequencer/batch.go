package sequencer

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// MaxBatchRevisions bounds the revisions of one node's batch, and so those of one request. It
// is a block: so much fits between the last revision and the ceiling once the next ceiling is
// committed.
const MaxBatchRevisions = CeilingBlock

// Bounds of a node's batch.
const (
	// MaxItems bounds its requests for revisions.
	MaxItems = 4096
	// MaxAlso bounds their further ranges, all together.
	MaxAlso = 8192
)

// Item is one request in a node's batch.
type Item struct {
	Range      keyspace.RangeID
	Generation keyspace.Generation
	Count      uint32
	// Also are further ranges that get the one revision.
	Also []keyspace.RangeAt
	// Permit is the oldest of those that the revisions are for.
	Permit keyspace.Permit
}

// Process names one run of one node.
type Process struct {
	Node keyspace.NodeID
	Boot keyspace.BootID
}

// Batch is what a node asks the sequencer at a time. Number grows by one from one
// content to the next; the same number always goes with the same content.
type Batch struct {
	Boot   keyspace.BootID
	Number uint64
	Items  []Item
}

// Total returns how many revisions the batch asks for.
func (b *Batch) Total() int {
	n := 0
	for i := range b.Items {
		n += int(b.Items[i].Count)
	}
	return n
}

// Grant answers a batch. Its items got their revisions in order, from Before+1 on
// and without a hole. Those whose permit ended at Access or before got none: both
// ends know them by that, so no revision is lost.
type Grant struct {
	// Number repeats the batch's.
	Number uint64
	// Term is the sequencer's.
	Term uint64
	// Before is the last revision allocated before the batch.
	Before keyspace.Revision
	// Compacted is the compacted revision, Settings that of the settings.
	Compacted, Settings keyspace.Revision
	// Access is the access index.
	Access keyspace.AccessIndex
}

// refuses says whether an item with the permit gets nothing.
func (g *Grant) refuses(p keyspace.Permit) bool {
	return p.Ended(g.Access) && !mutation.Is(mutation.PermitsUnseen)
}

// count is how many revisions an item of the batch got.
func (g *Grant) count(it *Item) keyspace.Revision {
	if g.refuses(it.Permit) {
		return 0
	}
	return keyspace.Revision(it.Count)
}

// Last is the last revision allocated to the batch's items, or before them.
func (g *Grant) Last(items []Item) keyspace.Revision {
	last := g.Before
	for i := range items {
		last += g.count(&items[i])
	}
	return last
}

// Answers calls f with the answer of each of the batch's items.
func (g *Grant) Answers(items []Item, f func(i int, a keyspace.SequenceAnswer)) {
	at := g.Before
	for i := range items {
		a := keyspace.SequenceAnswer{Term: g.Term, Compacted: g.Compacted, Settings: g.Settings, Access: g.Access}
		if g.refuses(items[i].Permit) {
			a.Err = kverror.New(kverror.AccessChanged, "rights were taken away at index %d", g.Access)
		} else if n := g.count(&items[i]); n > 0 {
			a.First = at + 1
			at += n
		}
		a.Current = at
		f(i, a)
	}
}

// Encode returns the form of the batch on the bus.
func (b *Batch) Encode() []byte {
	version := byte(batchVersion)
	for i := range b.Items {
		if b.Items[i].Permit != 0 {
			version = batchPermits
		}
	}
	dst := make([]byte, 0, 16+8*len(b.Items))
	dst = append(dst, version)
	dst = binary.BigEndian.AppendUint64(dst, uint64(b.Boot))
	dst = binary.AppendUvarint(dst, b.Number)
	dst = binary.AppendUvarint(dst, uint64(len(b.Items)))
	for i := range b.Items {
		dst = binary.AppendUvarint(dst, uint64(b.Items[i].Range))
		dst = binary.AppendUvarint(dst, uint64(b.Items[i].Generation))
		dst = binary.AppendUvarint(dst, uint64(b.Items[i].Count))
		dst = binary.AppendUvarint(dst, uint64(len(b.Items[i].Also)))
		for _, a := range b.Items[i].Also {
			dst = binary.AppendUvarint(dst, uint64(a.Range))
			dst = binary.AppendUvarint(dst, uint64(a.Generation))
		}
		if version == batchPermits {
			dst = binary.AppendUvarint(dst, uint64(b.Items[i].Permit))
		}
	}
	return dst
}

// The first byte of a batch. Version 2 knows revisions of several ranges, batchPermits permits too: it is
// written where there is one, so from keyspace.VersionAccess on.
const (
	batchVersion = 2
	batchPermits = 3
)

// DecodeBatch reads what Batch.Encode wrote.
func DecodeBatch(p []byte) (Batch, error) {
	r := fsm.NewReader(p)
	version := r.VersionFrom(batchVersion, batchPermits)
	b := Batch{Boot: keyspace.BootID(r.Uint64BE()), Number: r.Uvarint()}
	n := r.CountUpTo(MaxItems, 4)
	b.Items = make([]Item, 0, n)
	total, also, permits := 0, 0, version == batchVersion
	for range n {
		it := Item{Range: keyspace.RangeID(r.Uvarint()), Generation: keyspace.Generation(r.Uvarint())}
		it.Count = uint32(r.Bounded(MaxBatchRevisions))
		total += int(it.Count)
		for range r.CountUpTo(keyspace.MaxRevisionRanges-1, 2) {
			it.Also = append(it.Also, keyspace.RangeAt{Range: keyspace.RangeID(r.Uvarint()), Generation: keyspace.Generation(r.Uvarint())})
		}
		if also += len(it.Also); also > MaxAlso {
			r.Failf("revisions for %d further ranges, at most %d", also, MaxAlso)
			break
		}
		if len(it.Also) > 0 && it.Count != 1 {
			r.Failf("%d revisions for several ranges", it.Count)
		}
		if version == batchPermits {
			it.Permit = keyspace.Permit(r.Uvarint())
			permits = permits || it.Permit != 0
		}
		b.Items = append(b.Items, it)
	}
	if !permits {
		r.Failf("a batch with permits that has none")
	}
	if total > MaxBatchRevisions {
		r.Failf("%d revisions asked for, at most %d", total, MaxBatchRevisions)
	}
	if err := r.Finish(); err != nil {
		return Batch{}, fmt.Errorf("decode batch for the sequencer: %w", err)
	}
	return b, nil
}

// Encode returns the form of the grant on the bus.
func (g *Grant) Encode() []byte {
	code := byte(fsm.AnswerOK)
	if g.Access != 0 {
		code = answerAccess
	}
	dst := append(make([]byte, 0, 32), fsm.FormatVersion, code)
	dst = binary.AppendUvarint(dst, g.Number)
	dst = binary.AppendUvarint(dst, g.Term)
	dst = fsm.AppendRevision(dst, g.Before)
	dst = fsm.AppendRevision(dst, g.Compacted)
	dst = fsm.AppendRevision(dst, g.Settings)
	if g.Access != 0 {
		dst = binary.AppendUvarint(dst, uint64(g.Access))
	}
	return dst
}

// answerAccess is the code of a good answer with an access index, so from keyspace.VersionAccess on.
const answerAccess = fsm.AnswerOfHandler

// DecodeGrant reads what Grant.Encode wrote.
func DecodeGrant(p []byte) (Grant, error) {
	r, code, err := fsm.AnswerBodies(p, answerAccess)
	if err != nil {
		return Grant{}, err
	}
	g := Grant{
		Number: r.Uvarint(), Term: r.Uvarint(),
		Before: r.Revision(), Compacted: r.Revision(), Settings: r.Revision(),
	}
	if code == answerAccess {
		if g.Access = keyspace.AccessIndex(r.Uvarint()); g.Access == 0 {
			r.Failf("an access index of 0")
		}
	}
	if err := r.Finish(); err != nil {
		return Grant{}, fmt.Errorf("decode the sequencer's answer: %w", err)
	}
	return g, nil
}
