package eval

import (
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// cutVisits bounds the versions that one page of a cut looks at: some 10 ms of work.
const cutVisits = 20_000

const (
	// cutPageFirst is what a page of a cut has room for at first.
	cutPageFirst = 64 << 10
	// cutPageHead is more than what a page has of a version beside key and value.
	cutPageHead = 32
)

// CutPage reads a page of a cut from the store, up to end. Its caller sees to it that the store has the cut.
func CutPage(store engine.Reader, q *rangeapi.VersionsRequest, end []byte) (*rangeapi.VersionsPage, error) {
	o := mvcc.CutOptions{Cut: q.Cut, From: q.From, End: end, MaxBytes: int64(q.MaxBytes), MaxVisits: cutVisits}
	p := &rangeapi.VersionsPage{Body: make([]byte, 0, min(q.MaxBytes, cutPageFirst))}
	var last []byte
	var err error
	p.Next, err = mvcc.Versions(store, o, func(v *mvcc.StoredVersion) error {
		// A page that grows gets all of its room at once: append's quarters would allocate four times what it has in the end.
		if need := len(v.Key) + len(v.Value) + cutPageHead; cap(p.Body)-len(p.Body) < need {
			p.Body = slices.Grow(p.Body, max(q.MaxBytes-len(p.Body), 0)+need)
		}
		p.Add(last, v)
		last = append(last[:0], v.Key...)
		return nil
	})
	return p, err
}
