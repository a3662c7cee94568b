package mvcc

import (
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// The lease index says which user keys are attached to a lease now. It is a set of
// physical keys without values, written in the same batch as the versions: the writer of
// a version knows the lease of the previous one.

// LeaseIndex writes the index. It reuses memory for its keys, so only one goroutine at a
// time may use it. The zero value is ready.
type LeaseIndex struct{ key []byte }

// Attach records that the key is attached to the lease from now on.
func (x *LeaseIndex) Attach(w engine.Writer, lease keyspace.LeaseID, key []byte) error {
	if lease == 0 || len(key) == 0 {
		panic(fmt.Sprintf("mvcc: key %q attached to lease %d", key, lease))
	}
	x.key = engine.AppendLeaseKey(x.key[:0], lease, key)
	if err := w.Set(x.key, nil); err != nil {
		return fmt.Errorf("mvcc: attach %q to lease %d: %w", key, lease, err)
	}
	return nil
}

// Detach records that the key is no longer attached to the lease.
func (x *LeaseIndex) Detach(w engine.Writer, lease keyspace.LeaseID, key []byte) error {
	if lease == 0 || len(key) == 0 {
		panic(fmt.Sprintf("mvcc: key %q detached from lease %d", key, lease))
	}
	x.key = engine.AppendLeaseKey(x.key[:0], lease, key)
	if err := w.Delete(x.key); err != nil {
		return fmt.Errorf("mvcc: detach %q from lease %d: %w", key, lease, err)
	}
	return nil
}

// Attached calls fn, in order, with the keys of the span that are attached to the lease.
// It stops at fn's first error and returns it. A key is valid only during the call.
func Attached(r engine.Reader, lease keyspace.LeaseID, s keyspace.Span, fn func(key []byte) error) (err error) {
	b := engine.LeaseSpan(lease, s)
	it, err := r.NewIter(engine.IterOptions{Lower: b.Lower, Upper: b.Upper})
	if err != nil {
		return fmt.Errorf("mvcc: keys of lease %d: %w", lease, err)
	}
	defer func() {
		if cerr := it.Close(); err == nil {
			err = cerr
		}
	}()
	for ok := it.First(); ok; ok = it.Next() {
		_, key, err := engine.DecodeLeaseKey(it.Key())
		if err != nil {
			return fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		if err := fn(key); err != nil {
			return err
		}
	}
	if err := it.Error(); err != nil {
		return fmt.Errorf("mvcc: keys of lease %d: %w", lease, err)
	}
	return nil
}
