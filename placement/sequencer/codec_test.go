package sequencer

import (
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/internal/testkit"
)

var (
	goldenBatch    = Batch{Boot: 0xb001, Number: 9, Items: []Item{{Range: 7, Generation: 3, Count: 20}, {Range: 8, Generation: 1}, {Range: 9, Generation: 2, Count: 1, Also: []keyspace.RangeAt{{Range: 10, Generation: 4}}}}}
	goldenGrant    = Grant{Number: 9, Term: 6, Before: 56, Compacted: 40, Settings: 2}
	permittedBatch = Batch{Boot: 0xb001, Number: 10, Items: []Item{{Range: 7, Generation: 3, Count: 20, Permit: keyspace.PermitAt(300)}, {Range: 8, Generation: 1}}}
	accessGrant    = Grant{Number: 10, Term: 6, Before: 77, Compacted: 40, Settings: 2, Access: 301}
	// Revision 60 belongs to two ranges.
	goldenLogPart = LogPart{Term: 6, After: 56, Last: 61, Records: []Allocation{
		{First: 57, Count: 3, Range: 7, Generation: 3},
		{First: 60, Count: 1, Range: 8, Generation: 1},
		{First: 60, Count: 1, Range: 7, Generation: 3},
		{First: 61, Count: 1, Range: 300, Generation: 2},
	}}
)

// TestFormats compares the bytes of the sequencer's messages with
// testdata/golden.txt. A change there is a change of the format:
// docs/format/placement.md and the version change with it.
func TestFormats(t *testing.T) {
	var f testkit.File
	f.Add("bus/batch", goldenBatch.Encode())
	f.Add("bus/grant", goldenGrant.Encode())
	f.Add("bus/batch-permits@4", permittedBatch.Encode())
	f.Add("bus/grant-access@4", accessGrant.Encode())
	f.Add("bus/refusal", fsm.EncodeError(&kverror.Error{Kind: kverror.NotLeader, Leader: 0xa2}))
	f.Add("bus/log-request", EncodeLogRequest(LogPosition{Term: 6, Last: 56}))
	f.Add("bus/log-part", goldenLogPart.encode())
	f.Compare(t)
}

func TestDecodeEachPrefix(t *testing.T) { testkit.Prefixes(t, decoderOf) }

// decoderOf returns the decoder for a golden form's name.
func decoderOf(name string) func([]byte) error {
	return map[string]func([]byte) error{
		"bus/batch":           func(p []byte) error { _, err := DecodeBatch(p); return err },
		"bus/grant":           func(p []byte) error { _, err := DecodeGrant(p); return err },
		"bus/batch-permits@4": func(p []byte) error { _, err := DecodeBatch(p); return err },
		"bus/grant-access@4":  func(p []byte) error { _, err := DecodeGrant(p); return err },
		"bus/refusal":         func(p []byte) error { _, err := DecodeGrant(p); return err },
		"bus/log-request":     func(p []byte) error { _, err := DecodeLogRequest(p); return err },
		"bus/log-part":        func(p []byte) error { _, err := DecodeLogPart(p); return err },
	}[name]
}

func FuzzBatch(f *testing.F) {
	testkit.Fuzz(f, "bus/batch", DecodeBatch, func(b Batch) []byte { return b.Encode() })
}

func FuzzGrant(f *testing.F) {
	testkit.Fuzz(f, "bus/grant", DecodeGrant, func(g Grant) []byte { return g.Encode() })
}

// FuzzLogPart: a part of the allocation log, and a request for one, are the same after
// another trip.
func FuzzLogPart(f *testing.F) {
	testkit.Fuzz(f, "bus/log-part", DecodeLogPart, func(p LogPart) []byte { return p.encode() })
}

func FuzzLogRequest(f *testing.F) {
	testkit.Fuzz(f, "bus/log-request", DecodeLogRequest, EncodeLogRequest)
}
