package placement

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
)

var sampleDescriptor = keyspace.Descriptor{
	Range: 7, Generation: 3, ConfIndex: 21,
	Span:     keyspace.Span{Start: []byte("b"), End: []byte("d")},
	Replicas: []keyspace.Replica{{ID: 1, Node: 0xa1}, {ID: 4, Node: 0xa2, Role: keyspace.RoleLearner}},
}

var sampleOwn = keyspace.Descriptor{ConfIndex: 31, Replicas: []keyspace.Replica{{ID: 1, Node: 0xa1}, {ID: 9, Node: 0xa3, Role: keyspace.RoleVoterIncoming}}}

var sampleNode = Node{ID: 0xa1, Name: "n1", PeerURLs: []string{"http://h1:2380"}, ClientURLs: []string{"http://h1:2379", "http://h2:2379"}, State: NodeDraining, Since: 1_800_000_000_000, Attributes: []Attribute{{"rack", "r1"}, {"zone", "a"}}, Instance: 0xabc}

func sampleCommands() []command {
	ops := []effect{
		raiseCeiling{To: 10_001},
		lowerCeiling{To: 57},
		compact{At: 40},
		allocate{Count: 64},
		report{Descriptors: []keyspace.Descriptor{sampleDescriptor}},
		putNode{Change: nodeIsAdded, Now: 1_800_000_000_000, Node: sampleNode},
		markCreated{Ranges: []keyspace.RangeID{1, 2, 300}},
		putSetting{Name: "alarm", Value: []byte("nospace")},
		grantLease{ID: 0x7b, TTL: 60},
		registerLease{ID: -2, Span: keyspace.Span{Start: []byte("b"), End: []byte("d")}},
		revokeLeases{Leases: []LeaseRef{{ID: 0x7b, Incarnation: 44}, {ID: -2}}},
		removeLeases{Leases: []LeaseRef{{ID: 0x7b, Incarnation: 44}}},
		beginOperation{Generation: 3, ConfIndex: 21, Right: rangeVersion{4, 22}, Operation: Operation{Range: 7, Kind: OperationMove, From: 0xa1, To: 0xa2, Why: "asked for"}},
		endOperation{Range: 7, ID: 300},
		setNodeState{Node: 0xa1, From: NodeServing, To: NodeDraining, Now: 1_800_000_000_000},
		setNodeState{Node: 0xa1, From: NodeServing, To: NodeDecommissioned, Leave: true, Beside: []keyspace.NodeID{0xa2, 0xa3}, Now: 1_800_000_000_000},
		removeNode{Node: 0xa1, Now: 1_800_000_000_000},
		alignMerge{mergeRef{7, 300}, 0xa1, 0xa2},
		commitMerge{mergeRef{7, 300}, rangeVersion{3, 21}, rangeVersion{4, 22}},
		abortMerge{mergeRef{7, 300}},
		keepBorder{Key: []byte("m")},
		bindMerge{mergeRef{7, 300}},
	}
	cs := make([]command, len(ops))
	for i, op := range ops {
		cs[i] = command{Term: 6, Boot: 0xb001, Number: uint64(i + 1), Op: op}
	}
	return cs
}

func sampleRequests() []request {
	return []request{
		{Kind: requestAllocate, Count: 64},
		{Kind: requestReport, Descriptors: []keyspace.Descriptor{sampleDescriptor}},
		{Kind: requestCompact, Revision: 40},
		{Kind: requestMembers, Linearizable: true},
		{Kind: requestPutNode, Boot: 0xb001, Change: nodeHasMoved, Node: sampleNode},
		{Kind: requestStatus, Linearizable: true},
		{Kind: requestStop, Boot: 0xb001, Phase: stopClosed},
		{Kind: requestTransfer, To: 0xa2},
		{Kind: requestPutSetting, Name: "alarm", Value: []byte("nospace")},
		{Kind: requestSettings},
		{Kind: requestStanding},
		{Kind: requestLease, Lease: leaseRequest{Op: leaseRegister, ID: 0x7b, Span: keyspace.Span{Start: []byte("b")}}},
		{Kind: requestBegin, Operation: Operation{Range: 7, Kind: OperationMove, From: 0xa1, To: 0xa2, Why: "asked for"}},
		{Kind: requestOperations, Linearizable: true},
		{Kind: requestSetNodeState, To: 0xa1, From: NodeServing, Becomes: NodeDecommissioned, Beside: []keyspace.NodeID{0xa2}},
		{Kind: requestSetNodeState, To: 0xa1, From: NodeDecommissioned, Becomes: NodeDecommissioned, Leave: true},
		{Kind: requestRemoveNode, To: 0xa1},
		{Kind: requestKeepBorder, Key: []byte("m")},
	}
}

var sampleOperation = Operation{ID: 300, Range: 7, Kind: OperationMove, From: 0xa1, To: 0xa2, Lead: 0xa3, Replica: 9, Leaving: 4, Reason: decide.Repair, Why: "asked for"}

var sampleMerge = Operation{ID: 302, Range: 9, Kind: OperationMerge, Right: 10, Phase: MergeCommitted, From: 0xa1, To: 0xa2, Replica: 11, Leaving: 5, Why: "asked for"}

func sampleResponse(k requestKind) response {
	switch k {
	case requestAllocate:
		return response{First: 900}
	case requestReport:
		return response{Held: []keyspace.Descriptor{sampleDescriptor}}
	case requestCompact:
		return response{Revision: 57}
	case requestMembers:
		return response{Nodes: []Node{sampleNode}}
	case requestStatus:
		return response{Status: Status{Leader: 0xa2, Term: 6, Index: 100, Applied: 99, Replicas: sampleDescriptor.Replicas, ConfIndex: 21}}
	case requestStop:
		return response{Verdict: stopSealed}
	case requestStanding:
		return response{Standing: standing{boot: 0xb001, phase: stopClosing}}
	case requestPutNode, requestTransfer, requestPutSetting, requestSetNodeState, requestRemoveNode, requestKeepBorder:
	case requestLease:
		return response{Lease: leaseResponse{
			Revision: 57, More: true, Spans: sampleLease.Spans,
			Leases: []LeaseStatus{{LeaseRef: sampleLease.Ref(), Phase: LeaseEnding, TTL: 60, Remaining: -time.Second}},
		}}
	case requestBegin:
		return response{Operations: []Operation{sampleOperation}}
	case requestOperations:
		return response{Operations: []Operation{sampleOperation, {ID: 301, Range: 8, Kind: OperationRemove, From: 0xa1}, sampleMerge}}
	case requestSettings:
		return response{Revision: 2, Settings: []Setting{{Name: "alarm", Value: []byte("nospace")}}}
	}
	return response{}
}

// sampleLeaseRequests are one request about leases of each kind.
func sampleLeaseRequests() []leaseRequest {
	return []leaseRequest{
		{Op: leaseGrant, ID: 0x7b, TTL: 60},
		{Op: leaseRegister, ID: 0x7b, Span: keyspace.Span{Start: []byte("b"), End: []byte("d")}},
		{Op: leaseRenew, IDs: []keyspace.LeaseID{0x7b, -2}},
		{Op: leaseLook, ID: 0x7b},
		{Op: leaseList, ID: minLeaseID},
		{Op: leaseRevoke, ID: 0x7b},
		{Op: leaseWait, ID: 0x7b, Incarnation: 44},
	}
}

var sampleLease = Lease{
	ID: 0x7b, Incarnation: 44, TTL: 60, Revoking: true,
	Spans: []keyspace.Span{{End: []byte("b")}, {Start: []byte("d"), End: []byte("f")}, {Start: []byte("x")}},
}

var (
	sampleMeta  = meta{Cluster: 0xc1, Ceiling: 10_001, Compacted: -1, Settings: 2, NextRange: 12, NextReplica: 4, Changed: 33, NodesChanged: 30}
	sampleRange = Range{Descriptor: sampleDescriptor, Preferred: 0xa2, Created: true, Kept: true, Changed: 33}
	sampleBatch = batch{Boot: 0xb001, Number: 9, Items: []item{{Range: 7, Generation: 3, Count: 20}, {Range: 8, Generation: 1}, {Range: 9, Generation: 2, Count: 1, Also: []keyspace.RangeAt{{Range: 10, Generation: 4}}}}}
	sampleGrant = grant{Number: 9, Term: 6, Before: 56, Compacted: 40, Settings: 2}
	// Revision 60 belongs to two ranges.
	sampleLogPart = LogPart{Term: 6, After: 56, Last: 61, Records: []Handout{
		{First: 57, Count: 3, Range: 7, Generation: 3},
		{First: 60, Count: 1, Range: 8, Generation: 1},
		{First: 60, Count: 1, Range: 7, Generation: 3},
		{First: 61, Count: 1, Range: 300, Generation: 2},
	}}
	sampleNodePart = nodePart{
		Boot: 0xb001, Number: 9, Whole: true, More: true, Capacity: 1 << 40, Used: 300 << 30,
		Led: []Measure{{Range: 7, Term: 6, Bytes: 64 << 20, Load: 900}, {Range: 8}},
	}
	samplePart = feedPart{Version: 33, Full: true, Last: true, Rows: []*Range{&sampleRange}, Nodes: []Node{sampleNode}, Own: sampleOwn}
)

// TestGolden compares every format's bytes with testdata/golden.txt, and decodes
// them again. A change there is a change of the format: docs/format/placement.md
// and formatVersion change with it. SKEIN_REWRITE=1 writes the file.
func TestGolden(t *testing.T) {
	var b strings.Builder
	line := func(name string, p []byte) { fmt.Fprintf(&b, "%s %x\n", name, p) }
	for _, c := range sampleCommands() {
		p := c.encode()
		line(fmt.Sprintf("command/%T", c.Op), p)
		if got, err := decodeCommand(p); err != nil || !reflect.DeepEqual(got, c) {
			t.Errorf("decoded %+v, %v, want %+v", got, err, c)
		}
	}
	line("record/meta", appendMeta(nil, &sampleMeta))
	line("record/node", appendNode([]byte{formatVersion}, &sampleNode))
	line("record/table", EncodeNodeTable([]Node{sampleNode, {ID: 0xa2, State: NodeLearner}}))
	line("record/range", appendRange([]byte{formatVersion}, &sampleRange))
	line("record/setting", appendBytes([]byte{formatVersion}, []byte("nospace")))
	line("record/lease", appendLease([]byte{formatVersion}, &sampleLease))
	line("record/operation", appendOperation([]byte{formatVersion}, &sampleOperation))
	line("record/operation-merge", appendOperation([]byte{formatVersion}, &sampleMerge))
	for _, lq := range sampleLeaseRequests() {
		q := request{Kind: requestLease, Lease: lq}
		line(fmt.Sprintf("bus/request-%d-%d", q.Kind, lq.Op), q.encode())
		if got, err := decodeRequest(q.encode()); err != nil || !reflect.DeepEqual(got, q) {
			t.Errorf("decoded %+v, %v, want %+v", got, err, q)
		}
	}
	line("bus/batch", sampleBatch.encode())
	line("bus/grant", sampleGrant.encode())
	line("bus/refusal", encodeError(&kverror.Error{Kind: kverror.NotLeader, Leader: 0xa2}))
	for _, q := range sampleRequests() {
		p := q.encode()
		line(fmt.Sprintf("bus/request-%d", q.Kind), p)
		if got, err := decodeRequest(p); err != nil || !reflect.DeepEqual(got, q) {
			t.Errorf("decoded %+v, %v, want %+v", got, err, q)
		}
		a := sampleResponse(q.Kind)
		line(fmt.Sprintf("bus/response-%d", q.Kind), a.encode(q.Kind))
		if got, err := decodeResponse(q.Kind, a.encode(q.Kind)); err != nil || !reflect.DeepEqual(got, a) {
			t.Errorf("decoded %+v, %v, want %+v", got, err, a)
		}
	}
	line("bus/feed-request", encodeFeedRequest(32))
	line("bus/feed-part", samplePart.encode())
	line("bus/log-request", encodeLogRequest(LogPosition{Term: 6, Last: 56}))
	line("bus/log-part", sampleLogPart.encode())
	line("bus/report-part", sampleNodePart.encode())
	line("bus/report-answer", encodePartAnswer(true))
	path := filepath.Join("testdata", "golden.txt")
	if os.Getenv("SKEIN_REWRITE") != "" {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("the formats have changed:\n%s\nwant\n%s", b.String(), want)
	}
}

// TestDecodeEachPrefix cuts every golden value short at each byte: no decoder
// accepts a part, and none panics.
func TestDecodeEachPrefix(t *testing.T) {
	for name, p := range goldenValues(t) {
		decode := decoderOf(name)
		if err := decode(p); err != nil && name != "bus/refusal" {
			t.Errorf("%s: %v", name, err)
		}
		for n := range p {
			if decode(p[:n:n]) == nil {
				t.Errorf("%s: the first %d of %d bytes were accepted", name, n, len(p))
			}
		}
		if decode(append(bytes.Clone(p), 0)) == nil {
			t.Errorf("%s: a byte too many was accepted", name)
		}
	}
}

func goldenValues(t testing.TB) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "golden.txt"))
	if err != nil {
		t.Fatal(err)
	}
	values := map[string][]byte{}
	for line := range strings.Lines(string(text)) {
		name, h, _ := strings.Cut(strings.TrimSpace(line), " ")
		p, err := hex.DecodeString(h)
		if err != nil {
			t.Fatal(err)
		}
		values[name] = p
	}
	return values
}

// decoderOf returns the decoder for a golden value's name.
func decoderOf(name string) func([]byte) error {
	var kind requestKind
	switch {
	case strings.HasPrefix(name, "command/"):
		return func(p []byte) error { _, err := decodeCommand(p); return err }
	case strings.HasPrefix(name, "bus/request-"):
		return func(p []byte) error { _, err := decodeRequest(p); return err }
	case strings.HasPrefix(name, "bus/response-"):
		_, _ = fmt.Sscanf(name, "bus/response-%d", &kind)
		return func(p []byte) error { _, err := decodeResponse(kind, p); return err }
	}
	return map[string]func([]byte) error{
		"record/meta":      func(p []byte) error { _, err := decodeMeta(p); return err },
		"record/node":      func(p []byte) error { _, err := decodeNode(p); return err },
		"record/table":     func(p []byte) error { _, err := DecodeNodeTable(p); return err },
		"record/range":     func(p []byte) error { _, err := decodeRange(p); return err },
		"record/lease":     func(p []byte) error { _, err := decodeLease(p); return err },
		"record/operation": func(p []byte) error { _, err := decodeOperation(p); return err },

		"record/operation-merge": func(p []byte) error { _, err := decodeOperation(p); return err },

		"record/setting":   func(p []byte) error { _, err := decodeSetting(p); return err },
		"bus/batch":        func(p []byte) error { _, err := decodeBatch(p); return err },
		"bus/grant":        func(p []byte) error { _, err := decodeGrant(p); return err },
		"bus/refusal":      func(p []byte) error { _, err := decodeGrant(p); return err },
		"bus/feed-request": func(p []byte) error { _, err := decodeFeedRequest(p); return err },
		"bus/feed-part":    func(p []byte) error { _, err := decodeFeedPart(p); return err },
		"bus/log-request":  func(p []byte) error { _, err := decodeLogRequest(p); return err },
		"bus/log-part":     func(p []byte) error { _, err := decodeLogPart(p); return err },

		"bus/report-part":   func(p []byte) error { _, err := decodeNodePart(p); return err },
		"bus/report-answer": func(p []byte) error { _, err := decodePartAnswer(p); return err },
	}[name]
}

// fuzzDecoder checks that a decoder neither panics nor accepts bytes that it would
// write in another way than a second round trip does.
func fuzzDecoder[T any](f *testing.F, prefix string, decode func([]byte) (T, error), encode func(T) []byte) {
	f.Helper()
	for name, p := range goldenValues(f) {
		if strings.HasPrefix(name, prefix) {
			f.Add(p)
		}
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		var v T
		var err error
		if got := measure.Excess(len(p), func() { v, err = decode(p) }); got != 0 {
			t.Fatalf("%d bytes allocated for %d that came", got, len(p))
		}
		if err != nil {
			return
		}
		again, err := decode(encode(v))
		if err != nil || !reflect.DeepEqual(v, again) {
			t.Fatalf("%x decodes to %+v, which decodes to %+v, %v", p, v, again, err)
		}
	})
}

func FuzzCommand(f *testing.F) {
	fuzzDecoder(f, "command/", decodeCommand, func(c command) []byte { return c.encode() })
}

func FuzzMeta(f *testing.F) {
	fuzzDecoder(f, "record/meta", decodeMeta, func(m meta) []byte { return appendMeta(nil, &m) })
}

func FuzzNode(f *testing.F) {
	fuzzDecoder(f, "record/node", decodeNode, func(n Node) []byte { return appendNode([]byte{formatVersion}, &n) })
}

func FuzzRange(f *testing.F) {
	fuzzDecoder(f, "record/range", decodeRange, func(g Range) []byte { return appendRange([]byte{formatVersion}, &g) })
}

func FuzzSetting(f *testing.F) {
	fuzzDecoder(f, "record/setting", decodeSetting, func(v []byte) []byte { return appendBytes([]byte{formatVersion}, v) })
}

func FuzzOperation(f *testing.F) {
	fuzzDecoder(f, "record/operation", decodeOperation, func(o Operation) []byte { return appendOperation([]byte{formatVersion}, &o) })
}

func FuzzLease(f *testing.F) {
	fuzzDecoder(f, "record/lease", decodeLease, func(l Lease) []byte { return appendLease([]byte{formatVersion}, &l) })
}

func FuzzBatch(f *testing.F) {
	fuzzDecoder(f, "bus/batch", decodeBatch, func(b batch) []byte { return b.encode() })
}

func FuzzGrant(f *testing.F) {
	fuzzDecoder(f, "bus/grant", decodeGrant, func(g grant) []byte { return g.encode() })
}

func FuzzRequest(f *testing.F) {
	fuzzDecoder(f, "bus/request", decodeRequest, func(q request) []byte { return q.encode() })
}

func FuzzResponse(f *testing.F) {
	for name, p := range goldenValues(f) {
		var kind uint8
		if n, _ := fmt.Sscanf(name, "bus/response-%d", &kind); n == 1 {
			f.Add(kind, p)
		}
	}
	f.Fuzz(func(t *testing.T, kind uint8, p []byte) {
		k := requestKind(kind)
		var a response
		var err error
		if got := measure.Excess(len(p), func() { a, err = decodeResponse(k, p) }); got != 0 {
			t.Fatalf("%d bytes allocated for %d that came", got, len(p))
		}
		if err != nil || k == 0 || k > requestKeepBorder {
			return
		}
		again, err := decodeResponse(k, a.encode(k))
		if err != nil || !reflect.DeepEqual(a, again) {
			t.Fatalf("%x decodes to %+v, which decodes to %+v, %v", p, a, again, err)
		}
	})
}

// FuzzFeed gives a receiver two parts: whatever they hold, it ends up with a map
// that covers the keyspace exactly once, or with an error.
func FuzzFeed(f *testing.F) {
	whole := samplePart
	whole.Rows = []*Range{{Descriptor: keyspace.Descriptor{Range: 1, Generation: 1, Replicas: sampleDescriptor.Replicas}, Changed: 10}}
	f.Add(whole.encode(), samplePart.encode())
	f.Add([]byte{}, encodeFeedRequest(1))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var r feedReceiver
		for _, p := range [][]byte{a, b} {
			m, err := r.receive(p)
			if err != nil {
				return
			}
			if m != nil && m.check() != nil {
				t.Fatalf("a map that does not cover: %v", m.check())
			}
		}
		_, _ = decodeFeedRequest(b)
	})
}

// FuzzFeedPart: a part of the feed, and a request for one, are the same after another
// trip.
func FuzzFeedPart(f *testing.F) {
	fuzzDecoder(f, "bus/feed-part", decodeFeedPart, func(p feedPart) []byte { return p.encode() })
}

func FuzzFeedRequest(f *testing.F) {
	fuzzDecoder(f, "bus/feed-request", decodeFeedRequest, encodeFeedRequest)
}

// FuzzLogPart: a part of the hand-out log, and a request for one, are the same after
// another trip.
func FuzzLogPart(f *testing.F) {
	fuzzDecoder(f, "bus/log-part", decodeLogPart, func(p LogPart) []byte { return p.encode() })
}

func FuzzLogRequest(f *testing.F) {
	fuzzDecoder(f, "bus/log-request", decodeLogRequest, encodeLogRequest)
}

// FuzzNodePart: a part of a node's report is the same after another trip, and so is the
// answer.
func FuzzNodePart(f *testing.F) {
	fuzzDecoder(f, "bus/report-part", decodeNodePart, func(p nodePart) []byte { return p.encode() })
}

func FuzzPartAnswer(f *testing.F) {
	fuzzDecoder(f, "bus/report-answer", decodePartAnswer, encodePartAnswer)
}
