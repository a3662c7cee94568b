package eval

import (
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// cutVisits bounds the versions that one page of a cut looks at: some 10 ms of work.
const cutVisits = 20_000

// CutPage reads a page of a cut from the store, up to end. Its caller sees to it that the store has the cut.
func CutPage(store engine.Reader, q *rangeapi.VersionsRequest, end []byte) (*rangeapi.VersionsPage, error) {
	o := mvcc.CutOptions{Cut: q.Cut, From: q.From, End: end, MaxBytes: int64(q.MaxBytes), MaxVisits: cutVisits}
	p := &rangeapi.VersionsPage{Body: make([]byte, 0, min(q.MaxBytes, 64<<10))}
	var last []byte
	var err error
	p.Next, err = mvcc.Versions(store, o, func(v *mvcc.StoredVersion) error {
		p.Add(last, v)
		last = append(last[:0], v.Key...)
		return nil
	})
	return p, err
}
