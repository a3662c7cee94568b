package shard

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

func sampleOrders() []FeedOrder {
	return []FeedOrder{{ID: 1, Range: 7, Generation: 3, From: 200, Prev: true}, {ID: 9, Close: true}, {ID: 300, Range: 1, Generation: 1}}
}

func sampleEvents() []Event {
	put := mvcc.Version{Key: []byte("a"), Mod: 210, Create: 201, Version: 4, Lease: -77, Sub: 2, Value: []byte("new")}
	before := mvcc.Version{Key: []byte("a"), Mod: 205, Create: 201, Version: 3, Lease: 5, Value: []byte("old")}
	return []Event{
		{Version: put, Looked: true, Prev: &before},
		{Version: mvcc.Version{Key: []byte("b"), Mod: 211, Tombstone: true}, Looked: true},
		{Version: mvcc.Version{Key: []byte("c"), Mod: 209, Create: 209, Version: 1, Value: []byte{}}},
	}
}

func sampleParts() []FeedPart {
	return []FeedPart{
		{ID: 1, Complete: 208, Mark: Mark{Term: 6, Number: 300}, Events: sampleEvents()},
		{ID: 300, Complete: 300},
		{ID: 9, Err: &kverror.Error{Kind: kverror.WrongRange, Leader: 2, Descriptors: []keyspace.Descriptor{testDescriptor}}},
	}
}

var (
	sampleComplete = CompleteRequest{Range: 7, Generation: 3, Revision: 300}
	sampleHistory  = HistoryRequest{
		Range: 7, Generation: 3, Span: keyspace.Span{Start: []byte("a"), End: []byte("c")},
		From: 200, To: 300, Seen: Mark{Term: 6, Number: 299}, MaxBytes: 1 << 20, Prev: true, Compacted: 190, FromKey: []byte("aa"),
	}
)

func samplePage() *HistoryPage {
	return &HistoryPage{Events: sampleEvents(), Next: 250, NextKey: []byte("ab")}
}

func encodeParts(ps []FeedPart) []byte {
	b := []byte{feedVersion}
	for i := range ps {
		b = appendPart(b, &ps[i])
	}
	return b
}

// TestFeedRoundTrip also cuts every message short at each byte: what is accepted is a
// message of fewer parts, and nothing panics.
func TestFeedRoundTrip(t *testing.T) {
	check := func(name string, got, want any, err error) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, want)
		}
	}
	orders, err := decodeOrders(encodeOrders(sampleOrders()))
	check("orders", orders, sampleOrders(), err)
	parts, err := decodeParts(encodeParts(sampleParts()))
	check("parts", parts, sampleParts(), err)
	c, _, err := decodeQuestion(sampleComplete.encode())
	check("complete", c, &sampleComplete, err)
	_, h, err := decodeQuestion(sampleHistory.encode())
	check("history", h, &sampleHistory, err)
	p, err := decodeHistoryPage(samplePage().encode())
	check("page", p, samplePage(), err)
	applied, err := decodeComplete(encodeComplete(Mark{Term: 6, Number: 300}))
	check("answer", applied, Mark{Term: 6, Number: 300}, err)
	if _, err := decodeHistoryPage(encodeWatchError(kverror.Compacted)); kverror.Of(err).Kind != kverror.Compacted {
		t.Errorf("an error came back as %v", err)
	}
	for _, b := range [][]byte{sampleComplete.encode(), sampleHistory.encode(), samplePage().encode(), encodeComplete(Mark{Term: 6, Number: 300})} {
		for n := range b {
			_, _, e1 := decodeQuestion(b[:n:n])
			_, e2 := decodeHistoryPage(b[:n:n])
			if e1 == nil || e2 == nil {
				t.Errorf("%x: the first %d bytes were accepted (%v, %v)", b, n, e1, e2)
			}
		}
	}
	b := encodeParts(sampleParts())
	for n := range b {
		got, err := decodeParts(b[:n:n])
		if err == nil && !bytes.Equal(encodeParts(got), b[:n]) {
			t.Errorf("the first %d bytes became %+v", n, got)
		}
	}
}

// FuzzFeedParts: what decodes is the same after another trip, and what is only claimed
// is not allocated.
func FuzzFeedParts(f *testing.F) {
	f.Add(encodeParts(sampleParts()))
	f.Add([]byte{feedVersion, partEvents, 1, 1, 0xff, 0xff, 0x03})
	f.Fuzz(func(t *testing.T, b []byte) {
		var ps []FeedPart
		var err error
		claims(t, b, func() { ps, err = decodeParts(b) })
		if err != nil {
			return
		}
		again, err := decodeParts(encodeParts(ps))
		if err != nil || !reflect.DeepEqual(ps, again) {
			t.Fatalf("%+v became %+v (%v)", ps, again, err)
		}
	})
}

func FuzzFeedOrders(f *testing.F) {
	f.Add(encodeOrders(sampleOrders()))
	f.Fuzz(func(t *testing.T, b []byte) {
		var os []FeedOrder
		var err error
		claims(t, b, func() { os, err = decodeOrders(b) })
		if err != nil {
			return
		}
		again, err := decodeOrders(encodeOrders(os))
		if err != nil || !reflect.DeepEqual(os, again) {
			t.Fatalf("%+v became %+v (%v)", os, again, err)
		}
	})
}

// FuzzWatchQuestions takes both directions of bus method 19.
func FuzzWatchQuestions(f *testing.F) {
	for _, b := range [][]byte{sampleComplete.encode(), sampleHistory.encode(), samplePage().encode(), encodeComplete(Mark{Term: 6, Number: 300}), encodeWatchError(kverror.Compacted)} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		claims(t, b, func() {
			if c, h, err := decodeQuestion(b); err == nil && c != nil {
				again, _, err := decodeQuestion(c.encode())
				if err != nil || *again != *c {
					t.Fatalf("%+v became %+v (%v)", c, again, err)
				}
			} else if err == nil {
				_, again, err := decodeQuestion(h.encode())
				if err != nil || !reflect.DeepEqual(again, h) {
					t.Fatalf("%+v became %+v (%v)", h, again, err)
				}
			}
			_, _ = decodeComplete(b)
			if p, err := decodeHistoryPage(b); err == nil {
				again, err := decodeHistoryPage(p.encode())
				if err != nil || !reflect.DeepEqual(again, p) {
					t.Fatalf("%+v became %+v (%v)", p, again, err)
				}
			}
		})
	})
}
