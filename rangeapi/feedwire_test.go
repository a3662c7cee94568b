package rangeapi

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/skeindb/skein/internal/measure"
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
		{ID: 1, Resolved: 208, Position: FeedPosition{Term: 6, Number: 300}, Events: sampleEvents()},
		{ID: 300, Resolved: 300},
		{ID: 9, Err: &kverror.Error{Kind: kverror.WrongRange, Leader: 2, Descriptors: []keyspace.Descriptor{sampleDescriptor}}},
	}
}

var (
	sampleResolved = ResolvedRequest{Range: 7, Generation: 3, Revision: 300}
	sampleHistory  = HistoryRequest{
		Range: 7, Generation: 3, Span: keyspace.Span{Start: []byte("a"), End: []byte("c")},
		From: 200, To: 300, Seen: FeedPosition{Term: 6, Number: 299}, MaxBytes: 1 << 20, Prev: true, Compacted: 190, FromKey: []byte("aa"),
	}
)

func sampleHistoryPage() *HistoryPage {
	return &HistoryPage{Events: sampleEvents(), Next: 250, NextKey: []byte("ab")}
}

func encodeParts(ps []FeedPart) []byte {
	b := []byte{FeedVersion}
	for i := range ps {
		b = AppendPart(b, &ps[i])
	}
	return b
}

// TestFeedRoundTrip also cuts every message short at each byte. An accepted message has fewer
// parts, and nothing panics.
func TestFeedRoundTrip(t *testing.T) {
	check := func(name string, got, want any, err error) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, want)
		}
	}
	orders, err := DecodeOrders(EncodeOrders(sampleOrders()))
	check("orders", orders, sampleOrders(), err)
	parts, err := DecodeParts(encodeParts(sampleParts()))
	check("parts", parts, sampleParts(), err)
	c, _, err := DecodeWatchRequest(sampleResolved.encode())
	check("complete", c, &sampleResolved, err)
	_, h, err := DecodeWatchRequest(sampleHistory.encode())
	check("history", h, &sampleHistory, err)
	p, err := decodeHistoryPage(sampleHistoryPage().Encode())
	check("page", p, sampleHistoryPage(), err)
	applied, err := decodeResolved(EncodeResolved(FeedPosition{Term: 6, Number: 300}))
	check("answer", applied, FeedPosition{Term: 6, Number: 300}, err)
	if _, err := decodeHistoryPage(EncodeWatchError(kverror.Compacted)); kverror.Of(err).Kind != kverror.Compacted {
		t.Errorf("an error came back as %v", err)
	}
	for _, b := range [][]byte{sampleResolved.encode(), sampleHistory.encode(), sampleHistoryPage().Encode(), EncodeResolved(FeedPosition{Term: 6, Number: 300})} {
		for n := range b {
			_, _, e1 := DecodeWatchRequest(b[:n:n])
			_, e2 := decodeHistoryPage(b[:n:n])
			if e1 == nil || e2 == nil {
				t.Errorf("%x: the first %d bytes were accepted (%v, %v)", b, n, e1, e2)
			}
		}
	}
	b := encodeParts(sampleParts())
	for n := range b {
		got, err := DecodeParts(b[:n:n])
		if err == nil && !bytes.Equal(encodeParts(got), b[:n]) {
			t.Errorf("the first %d bytes became %+v", n, got)
		}
	}
}

// FuzzFeedParts: decoded parts survive another round trip, and the decoder allocates no more than
// the input holds.
func FuzzFeedParts(f *testing.F) {
	f.Add(encodeParts(sampleParts()))
	f.Add([]byte{FeedVersion, partEvents, 1, 1, 0xff, 0xff, 0x03})
	f.Fuzz(func(t *testing.T, b []byte) {
		var ps []FeedPart
		var err error
		measure.Claims(t, b, func() { ps, err = DecodeParts(b) })
		if err != nil {
			return
		}
		again, err := DecodeParts(encodeParts(ps))
		if err != nil || !reflect.DeepEqual(ps, again) {
			t.Fatalf("%+v became %+v (%v)", ps, again, err)
		}
	})
}

func FuzzFeedOrders(f *testing.F) {
	f.Add(EncodeOrders(sampleOrders()))
	f.Fuzz(func(t *testing.T, b []byte) {
		var os []FeedOrder
		var err error
		measure.Claims(t, b, func() { os, err = DecodeOrders(b) })
		if err != nil {
			return
		}
		again, err := DecodeOrders(EncodeOrders(os))
		if err != nil || !reflect.DeepEqual(os, again) {
			t.Fatalf("%+v became %+v (%v)", os, again, err)
		}
	})
}

// FuzzWatchQuestions takes both directions of bus method 22.
func FuzzWatchQuestions(f *testing.F) {
	for _, b := range [][]byte{sampleResolved.encode(), sampleHistory.encode(), sampleHistoryPage().Encode(), EncodeResolved(FeedPosition{Term: 6, Number: 300}), EncodeWatchError(kverror.Compacted)} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		measure.Claims(t, b, func() {
			if c, h, err := DecodeWatchRequest(b); err == nil && c != nil {
				again, _, err := DecodeWatchRequest(c.encode())
				if err != nil || *again != *c {
					t.Fatalf("%+v became %+v (%v)", c, again, err)
				}
			} else if err == nil {
				_, again, err := DecodeWatchRequest(h.encode())
				if err != nil || !reflect.DeepEqual(again, h) {
					t.Fatalf("%+v became %+v (%v)", h, again, err)
				}
			}
			_, _ = decodeResolved(b)
			if p, err := decodeHistoryPage(b); err == nil {
				again, err := decodeHistoryPage(p.Encode())
				if err != nil || !reflect.DeepEqual(again, p) {
					t.Fatalf("%+v became %+v (%v)", p, again, err)
				}
			}
		})
	})
}
