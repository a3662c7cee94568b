package block

import (
	"fmt"

	"github.com/skeindb/skein/mvcc"
)

// Sum describes a set of versions, whatever their order. Sums of disjoint sets add up. It
// protects against faults, not against an adversary.
type Sum struct {
	// Versions counts the versions, earlier writes not among them.
	Versions int64 `json:"versions"`
	// Bytes is the size of their keys and values, that of the values of earlier writes
	// included.
	Bytes int64 `json:"bytes"`
	// Hash is the sum modulo 2^64 of mvcc.HashWrite of every write, earlier ones included.
	// So it equals what the versions add to the hash of a range.
	Hash uint64 `json:"hash,string"`
}

// Add adds a version.
func (s *Sum) Add(v *mvcc.Version) {
	s.Versions++
	s.Bytes += v.Size()
	s.Hash += mvcc.HashWrite(v)
	for w := v.Earlier; w != nil; w = w.Earlier {
		s.Bytes += int64(len(w.Value))
		s.Hash += mvcc.HashWrite(w)
	}
}

// Merge adds what another sum describes.
func (s *Sum) Merge(o Sum) {
	s.Versions += o.Versions
	s.Bytes += o.Bytes
	s.Hash += o.Hash
}

// String returns the sum in words.
func (s Sum) String() string {
	return fmt.Sprintf("%d versions, %d bytes, hash %016x", s.Versions, s.Bytes, s.Hash)
}
