package placement

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// MaxBatchRevisions bounds the revisions of one node's batch, and so those of one
// request: a block, which is what fits between counter and ceiling once the next
// one is committed.
const MaxBatchRevisions = CeilingBlock

// item is one request in a node's batch.
type item struct {
	Range      keyspace.RangeID
	Generation keyspace.Generation
	Count      uint32
	// Also are further ranges that get the one revision.
	Also []keyspace.RangeAt
}

// process names one run of one node.
type process struct {
	Node keyspace.NodeID
	Boot keyspace.BootID
}

// batch is what a node asks the sequencer at a time. Number grows by one from one
// content to the next; the same number always goes with the same content.
type batch struct {
	Boot   keyspace.BootID
	Number uint64
	Items  []item
}

// total returns how many revisions the batch asks for.
func (b *batch) total() int {
	n := 0
	for i := range b.Items {
		n += int(b.Items[i].Count)
	}
	return n
}

// grant answers a batch. Its items got their revisions in order, from Before+1 on
// and without a hole.
type grant struct {
	// Number repeats the batch's.
	Number uint64
	// Term is the sequencer's.
	Term uint64
	// Before is the last revision handed out before the batch.
	Before keyspace.Revision
	// Compacted is the compacted revision, Settings that of the settings.
	Compacted, Settings keyspace.Revision
}

// answers calls f with the answer of each of the batch's items.
func (g *grant) answers(items []item, f func(i int, a keyspace.SequenceAnswer)) {
	at := g.Before
	for i := range items {
		a := keyspace.SequenceAnswer{Compacted: g.Compacted, Settings: g.Settings}
		if items[i].Count > 0 {
			a.First = at + 1
			at += keyspace.Revision(items[i].Count)
		}
		a.Current = at
		f(i, a)
	}
}

func (b *batch) encode() []byte {
	dst := make([]byte, 0, 16+8*len(b.Items))
	dst = append(dst, batchVersion)
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
	}
	return dst
}

// batchVersion leads a batch. Version 2 knows revisions of several ranges.
const batchVersion = 2

func decodeBatch(p []byte) (batch, error) {
	r := reader{wire.NewReader(p)}
	if v := r.Byte(); r.OK() && v != batchVersion {
		r.Failf("version %d of a batch, want %d", v, batchVersion)
	}
	b := batch{Boot: keyspace.BootID(r.Uint64BE()), Number: r.Uvarint()}
	n := r.count(maxItems, 4)
	b.Items = make([]item, 0, n)
	total, also := 0, 0
	for range n {
		it := item{Range: keyspace.RangeID(r.Uvarint()), Generation: keyspace.Generation(r.Uvarint())}
		it.Count = uint32(r.bounded(MaxBatchRevisions))
		total += int(it.Count)
		for range r.count(keyspace.MaxRevisionRanges-1, 2) {
			it.Also = append(it.Also, keyspace.RangeAt{Range: keyspace.RangeID(r.Uvarint()), Generation: keyspace.Generation(r.Uvarint())})
		}
		if also += len(it.Also); also > maxAlso {
			r.Failf("revisions for %d further ranges, at most %d", also, maxAlso)
			break
		}
		if len(it.Also) > 0 && it.Count != 1 {
			r.Failf("%d revisions for several ranges", it.Count)
		}
		b.Items = append(b.Items, it)
	}
	if total > MaxBatchRevisions {
		r.Failf("%d revisions asked for, at most %d", total, MaxBatchRevisions)
	}
	if err := r.end(); err != nil {
		return batch{}, fmt.Errorf("decode batch for the sequencer: %w", err)
	}
	return b, nil
}

// The first byte after the version of every answer on the bus.
const (
	answerOK    = 0
	answerError = 1
)

func (g *grant) encode() []byte {
	dst := append(make([]byte, 0, 32), formatVersion, answerOK)
	dst = binary.AppendUvarint(dst, g.Number)
	dst = binary.AppendUvarint(dst, g.Term)
	dst = appendRevision(dst, g.Before)
	dst = appendRevision(dst, g.Compacted)
	return appendRevision(dst, g.Settings)
}

// encodeError is the answer of a handler that refuses.
func encodeError(err error) []byte {
	return kverror.Append([]byte{formatVersion, answerError}, kverror.Of(err))
}

// answerBody returns a reader of what follows a good answer's head, or the error
// that the handler answered.
func answerBody(p []byte) (*reader, error) {
	r := &reader{wire.NewReader(p)}
	r.version()
	switch code := r.Byte(); {
	case !r.OK():
		return nil, fmt.Errorf("placement: %w", r.Err())
	case code == answerOK:
		return r, nil
	case code == answerError:
		e, err := kverror.Decode(r.Peek())
		if err != nil {
			return nil, fmt.Errorf("decode refusal: %w", err)
		}
		return nil, e
	default:
		return nil, fmt.Errorf("placement: answer of kind %d", code)
	}
}

func decodeGrant(p []byte) (grant, error) {
	r, err := answerBody(p)
	if err != nil {
		return grant{}, err
	}
	g := grant{
		Number: r.Uvarint(), Term: r.Uvarint(),
		Before: r.revision(), Compacted: r.revision(), Settings: r.revision(),
	}
	if err := r.end(); err != nil {
		return grant{}, fmt.Errorf("decode the sequencer's answer: %w", err)
	}
	return g, nil
}
