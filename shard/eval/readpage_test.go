package eval

import (
	"errors"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// A page with filters that nothing passes ends after so many keys.
func TestPageEndsWithoutAMatch(t *testing.T) {
	c := pageScan{p: &rangeapi.Page{RangeRequest: &pb.RangeRequest{MinModRevision: 5}, MaxBytes: 10}, filtered: true, budget: &Budget{}}
	c.answer.RangeResponse = &pb.RangeResponse{}
	v := &mvcc.Version{Key: []byte("k"), Mod: 4, Create: 4, Version: 1}
	for range maxPageSeen {
		if err := c.add(v); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.add(v); !errors.Is(err, ErrStop) || c.answer.More || string(c.answer.Next) != "k" || c.answer.Seen != maxPageSeen {
		t.Errorf("%v, %+v", err, &c.answer)
	}
}
