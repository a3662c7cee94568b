package block

import (
	"fmt"
	"slices"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/mvcc"
)

// Writer cuts a stream of versions into blocks. It is used by one goroutine.
type Writer struct {
	order  Order
	emit   func(b []byte, s Sum) error
	raw    []byte
	charge int64
	sum    Sum
	// last is the version before the next, of which it keeps what order and encoding
	// need. In a block it begins as the zero version.
	last, begin mvcc.Version
	any         bool
}

// NewWriter returns a Writer that gives each block with the sum of its versions to emit. The
// block's memory is then emit's.
func NewWriter(order Order, emit func(b []byte, s Sum) error) *Writer {
	return &Writer{order: order, emit: emit}
}

// Add adds a version, and emits the block before it if that is full. What v refers to may be
// reused after the call. It refuses a version that violates the model of package mvcc, does
// not follow the one before, or is charged more than MaxVersionBytes.
func (w *Writer) Add(v *mvcc.Version) error {
	if err := v.Validate(); err != nil {
		return fmt.Errorf("block: %w", err)
	}
	if w.any {
		if err := w.order.follows(&w.last, v); err != nil {
			return fmt.Errorf("block: %w", err)
		}
	}
	charge := Charge(v)
	if charge > MaxVersionBytes || len(v.Key) > MaxBytes {
		return fmt.Errorf("block: key %.64q at revision %d: key of %d bytes and %d bytes in all, at most %d and %d",
			v.Key, v.Mod, len(v.Key), charge, MaxBytes, MaxVersionBytes)
	}
	if w.charge+charge > MaxBytes {
		if err := w.Flush(); err != nil {
			return err
		}
	}
	prev := &w.last
	if w.sum.Versions == 0 {
		prev = &w.begin
	}
	w.raw = appendVersion(w.raw, v, prev)
	w.charge += charge
	w.sum.Add(v)
	w.any = true
	w.last = mvcc.Version{Key: append(w.last.Key[:0], v.Key...), Mod: v.Mod, Sub: v.Sub, Lease: v.Lease}
	return nil
}

// Flush emits the block begun, if there is one.
func (w *Writer) Flush() error {
	if w.sum.Versions == 0 {
		return nil
	}
	b, sum := pack(w.raw, int(w.sum.Versions), w.order), w.sum
	w.raw, w.charge, w.sum = w.raw[:0], 0, Sum{}
	if cap(w.raw) > 2*MaxBytes {
		w.raw = nil
	}
	return w.emit(b, sum)
}

// Pending is the charge of the block begun, 0 if there is none.
func (w *Writer) Pending() int64 { return w.charge }

// Decoder reads the blocks of one stream. It is used by one goroutine. The zero Decoder
// is ready for a stream ByKey.
type Decoder struct {
	// Order is the order in which the stream must be.
	Order    Order
	raw      []byte
	keys     []byte
	versions []mvcc.Version
	last     mvcc.Version
	any      bool
}

// Decode returns the versions of the stream's next block. They are valid until the next
// call. Errors are ErrCorrupt, but for a block of a version that this program does not know.
func (d *Decoder) Decode(b []byte) ([]mvcc.Version, error) {
	if cap(d.raw) > 2*MaxBytes {
		d.raw = nil // one huge version does not hold its memory for ever
	}
	raw, count, order, err := unpack(b, d.raw)
	d.raw = raw
	if err != nil {
		return nil, err
	}
	if order != d.Order {
		return nil, corrupt("a block %s in a stream %s", order, d.Order)
	}
	if count*minEncoded > len(raw) {
		return nil, corrupt("%d versions in %d bytes", count, len(raw))
	}
	d.versions = slices.Grow(d.versions[:0], count)[:count]
	clear(d.versions)
	r := versionReader{r: wire.NewReader(raw), order: order, keys: d.keys[:0]}
	var begin mvcc.Version
	for i, prev := 0, &begin; i < count; i++ {
		v := &d.versions[i]
		if err := r.next(v, prev, i == 0); err != nil {
			return nil, err
		}
		if count > 1 && r.charge > MaxBytes {
			return nil, corrupt("more than %d bytes of versions", MaxBytes)
		}
		prev = v
	}
	if err := r.r.End(); err != nil {
		return nil, corrupt("%v", err)
	}
	d.keys = r.keys
	if d.any {
		if err := order.follows(&d.last, &d.versions[0]); err != nil {
			return nil, corrupt("%v", err)
		}
	}
	last := &d.versions[count-1]
	d.last = mvcc.Version{Key: append(d.last.Key[:0], last.Key...), Mod: last.Mod, Sub: last.Sub}
	d.any = true
	return d.versions, nil
}

// minEncoded is the size of the smallest version: a tombstone of the key before.
const minEncoded = 2

// Decode returns the versions of a single block, and their order. They refer to memory of
// their own.
func Decode(b []byte) ([]mvcc.Version, Order, error) {
	var d Decoder
	if len(b) > headBytes && b[headBytes]&flagByRevision != 0 {
		d.Order = ByRevision
	}
	vs, err := d.Decode(b)
	return vs, d.Order, err
}

// Encode returns the blocks of the versions, for few of them.
func Encode(order Order, vs []mvcc.Version) (blocks [][]byte, sum Sum, err error) {
	w := NewWriter(order, func(b []byte, s Sum) error {
		blocks = append(blocks, b)
		sum.Merge(s)
		return nil
	})
	for i := range vs {
		if err := w.Add(&vs[i]); err != nil {
			return nil, Sum{}, err
		}
	}
	err = w.Flush()
	return blocks, sum, err
}
