package placement

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/internal/testkit"
	"github.com/skeindb/skein/rights"
)

var sampleDescriptor = keyspace.Descriptor{
	Range: 7, Generation: 3, ConfIndex: 21,
	Span:     keyspace.Span{Start: []byte("b"), End: []byte("d")},
	Replicas: []keyspace.Replica{{ID: 1, Node: 0xa1}, {ID: 4, Node: 0xa2, Role: keyspace.RoleLearner}},
}

var sampleOwn = keyspace.Descriptor{ConfIndex: 31, Replicas: []keyspace.Replica{{ID: 1, Node: 0xa1}, {ID: 9, Node: 0xa3, Role: keyspace.RoleVoterIncoming}}}

var sampleNode = fsm.Node{ID: 0xa1, Name: "n1", PeerURLs: []string{"http://h1:2380"}, ClientURLs: []string{"http://h1:2379", "http://h2:2379"}, State: fsm.NodeDraining, Since: 1_800_000_000_000, Attributes: []fsm.Attribute{{Key: "rack", Value: "r1"}, {Key: "zone", Value: "a"}}, Instance: 0xabc}

func sampleRequests() []request {
	return []request{
		{Kind: requestAllocate, Count: 64},
		{Kind: requestReport, Descriptors: []keyspace.Descriptor{sampleDescriptor}},
		{Kind: requestCompact, Revision: 40},
		{Kind: requestMembers, Linearizable: true},
		{Kind: requestPutNode, Change: fsm.NodeHasMoved, Node: sampleNode},
		{Kind: requestStatus, Linearizable: true},
		{Kind: requestTransfer, To: 0xa2},
		{Kind: requestPutSetting, Name: "alarm", Value: []byte("nospace")},
		{Kind: requestSettings},
		{Kind: requestLease, Lease: leaseRequest{Op: leaseRegister, ID: 0x7b, Span: keyspace.Span{Start: []byte("b")}}},
		{Kind: requestBegin, Operation: fsm.Operation{Range: 7, Kind: fsm.OperationMove, From: 0xa1, To: 0xa2, Why: "asked for"}},
		{Kind: requestOperations, Linearizable: true},
		{Kind: requestSetNodeState, To: 0xa1, From: fsm.NodeServing, Becomes: fsm.NodeDecommissioned, Beside: []keyspace.NodeID{0xa2}},
		{Kind: requestSetNodeState, To: 0xa1, From: fsm.NodeDecommissioned, Becomes: fsm.NodeDecommissioned, Leave: true},
		{Kind: requestRemoveNode, To: 0xa1},
		{Kind: requestKeepBorder, Key: []byte("m")},
		{Kind: requestRaiseVersion, Version: 4},
		{Kind: requestCredential, User: "alice"},
		{Kind: requestChangeAccess, Caller: "root", Access: rights.Change{Kind: rights.AddUser, User: "alice", Hash: []byte("$2a$10$hash")}},
		{Kind: requestTakenAccess, Index: 301},
		{Kind: requestAwaitAccess, Index: 301, Silence: 3030 * time.Millisecond},
		{Kind: requestPutHold, PutHold: fsm.PutHold{Create: true, ID: 0xb0, Kind: "backup", Owner: "db7, process 1", Revision: 40, Life: time.Hour}},
		{Kind: requestAccessRows, Key: []byte("ualice")},
		{Kind: requestEndHold, EndHold: fsm.EndHold{ID: 0xb0}},
		{Kind: requestAlarms, Alarm: fsm.ChangeAlarm{Change: fsm.AlarmDeactivated, Alarm: fsm.AlarmID{Type: fsm.AlarmNoSpace, Member: 0xa1}}},
		{Kind: requestLoad, Load: fsm.ChangeLoad{Step: fsm.LoadAdvance, Nonce: 0xa1b2, Phase: fsm.PhaseFollow, Position: 300}},
		{Kind: requestTransfer, Permit: 302, To: 0xa2},
		{Kind: requestLease, Permit: 302, Lease: leaseRequest{Op: leaseRevoke, ID: 0x7b}},
	}
}

var sampleOperation = fsm.Operation{ID: 300, Range: 7, Kind: fsm.OperationMove, From: 0xa1, To: 0xa2, Lead: 0xa3, Replica: 9, Leaving: 4, Reason: decide.Repair, Why: "asked for"}

var sampleMerge = fsm.Operation{ID: 302, Range: 9, Kind: fsm.OperationMerge, Right: 10, Phase: fsm.MergeCommitted, From: 0xa1, To: 0xa2, Replica: 11, Leaving: 5, Why: "asked for"}

func sampleResponse(k requestKind) response {
	switch k {
	case requestAllocate:
		return response{First: 900}
	case requestReport:
		return response{Held: []keyspace.Descriptor{sampleDescriptor}}
	case requestCompact:
		return response{Revision: 57}
	case requestMembers:
		return response{Nodes: []fsm.Node{sampleNode}}
	case requestStatus:
		return response{Status: Status{Leader: 0xa2, Term: 6, Index: 100, Applied: 99, Replicas: sampleDescriptor.Replicas, ConfIndex: 21}}
	case requestPutNode, requestTransfer, requestPutSetting, requestSetNodeState, requestRemoveNode, requestKeepBorder, requestRaiseVersion, requestEndHold:
	case requestChangeAccess, requestTakenAccess:
		return response{Index: 301}
	case requestAwaitAccess:
		return response{Lacking: []keyspace.NodeID{0xa1, 0xa3}}
	case requestCredential:
		return response{Credential: rights.Credential{Enabled: true, Hash: []byte("$2a$10$hash"), Since: 300, Index: 302, Revision: 9}}
	case requestAccessRows:
		return response{MapVersion: 302, More: true, AccessRows: []fsm.AccessRow{{Key: []byte("pr"), Value: []byte{9}}, {Key: []byte("ubob"), Value: []byte{9, 1}}}}
	case requestPutHold:
		return response{MapVersion: 33, Hold: sampleHolds[0]}
	case requestAlarms:
		return response{MapVersion: 33, Alarms: sampleAlarms}
	case requestLoad:
		return response{MapVersion: 33, Loading: &sampleLoad}
	case requestLease:
		return response{Lease: leaseResponse{
			Revision: 57, More: true, Spans: sampleLease.Spans,
			Leases: []LeaseStatus{{LeaseRef: sampleLease.Ref(), Phase: LeaseEnding, TTL: 60, Remaining: -time.Second}},
		}}
	case requestBegin:
		return response{Operations: []fsm.Operation{sampleOperation}}
	case requestOperations:
		return response{Operations: []fsm.Operation{sampleOperation, {ID: 301, Range: 8, Kind: fsm.OperationRemove, From: 0xa1}, sampleMerge}}
	case requestSettings:
		return response{Revision: 2, Settings: []fsm.Setting{{Name: "alarm", Value: []byte("nospace")}}}
	}
	return response{}
}

var sampleAlarms = []fsm.Alarm{{AlarmID: fsm.AlarmID{Type: fsm.AlarmNoSpace, Member: 0xa1}, Sticky: true}, {AlarmID: fsm.AlarmID{Type: fsm.AlarmCorrupt}}}

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
		{Op: leaseRevokeChecked, ID: 0x7b, Incarnation: 44, Checked: 57},
		{Op: leaseRegisterAll, Registrations: []fsm.RegisterLease{{ID: 0x7b, Span: keyspace.Span{Start: []byte("b"), End: []byte("d")}}, {ID: -2}}},
	}
}

var sampleLease = fsm.Lease{
	ID: 0x7b, Incarnation: 44, TTL: 60, Revoking: true,
	Spans: []keyspace.Span{{End: []byte("b")}, {Start: []byte("d"), End: []byte("f")}, {Start: []byte("x")}},
}

var (
	sampleRange    = fsm.Range{Descriptor: sampleDescriptor, Preferred: 0xa2, Created: true, Kept: true, Changed: 33}
	sampleNodePart = driver.Part{
		Boot: 0xb001, Number: 9, Whole: true, More: true, Capacity: 1 << 40, Used: 300 << 30, Full: true, NoSpace: true, Corrupt: true,
		Led:         []driver.Measure{{Range: 7, Term: 6, Bytes: 64 << 20, Load: 900}, {Range: 8}},
		Quarantined: []driver.Quarantined{{Range: 9, Replica: 21, Reason: "corruption in 000007.sst"}, {Range: 10}},
	}
	samplePart = feedPart{Version: 33, Full: true, Last: true, Rows: []*fsm.Range{&sampleRange}, Nodes: []fsm.Node{sampleNode}, Own: sampleOwn}
)

var sampleAccessPart = feedPart{Version: 302, Access: &fsm.AccessPart{
	Full: true, Meta: rights.Meta{Enabled: true, Revision: 9, EnabledSince: 290, Access: 301}, Changed: 302, Key: []byte{7, 8},
	Users:     []*rights.User{{Name: "alice", Roles: []string{"r"}, NoPassword: true, Since: 300}},
	Roles:     []*rights.Role{{Name: "r", Permissions: []rights.Permission{{Type: rights.Read, Key: []byte("a"), RangeEnd: []byte("b")}}}},
	GoneUsers: []string{"bob"}, GoneRoles: []string{"s"},
}}

var sampleHolds = []fsm.Hold{{ID: 0xb0, Kind: "backup", Owner: "db7, process 1", Revision: 40, Made: 1_700_000_000_000, Expires: 1_800_000_000_000}, {ID: 0xb1, Revision: 50, Expires: 1}}

var sampleHoldsPart = feedPart{Version: 302, Holds: &fsm.Holds{All: sampleHolds, Changed: 301}}

var sampleAlarmsPart = feedPart{Version: 302, Alarms: &fsm.Alarms{All: sampleAlarms, Changed: 301}}

var (
	sampleLoad     = fsm.Loading{Phase: fsm.PhaseBulk, Nonce: 0xa1b2, Source: "etcd a.db", Incarnation: 44, Started: 1_800_000_000_000, Changed: 301}
	sampleLoadPart = feedPart{Version: 302, Loading: &sampleLoad}
)

// TestFormats compares the bytes of what goes over the bus with testdata/golden.txt, and decodes
// them again. A change there is a change of the format: docs/format/placement.md
// and the message's version change with it.
func TestFormats(t *testing.T) {
	var f testkit.File
	line := f.Add
	line("record/table", EncodeNodeTable([]fsm.Node{sampleNode, {ID: 0xa2, State: fsm.NodeLearner}}))
	for _, lq := range sampleLeaseRequests() {
		q := request{Kind: requestLease, Lease: lq}
		line(fmt.Sprintf("bus/request-%d-%d", q.Kind, lq.Op), q.encode())
		if got, err := decodeRequest(q.encode()); err != nil || !reflect.DeepEqual(got, q) {
			t.Errorf("decoded %+v, %v, want %+v", got, err, q)
		}
	}
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
	line("bus/feed-part-access", sampleAccessPart.encode())
	if got, err := decodeFeedPart(sampleAccessPart.encode()); err != nil || !reflect.DeepEqual(got, sampleAccessPart) {
		t.Errorf("decoded %+v, %v, want %+v", got, err, sampleAccessPart)
	}
	line("bus/feed-part-alarms", sampleAlarmsPart.encode())
	if got, err := decodeFeedPart(sampleAlarmsPart.encode()); err != nil || !reflect.DeepEqual(got, sampleAlarmsPart) {
		t.Errorf("decoded %+v, %v, want %+v", got, err, sampleAlarmsPart)
	}
	line("bus/feed-part-holds", sampleHoldsPart.encode())
	if got, err := decodeFeedPart(sampleHoldsPart.encode()); err != nil || !reflect.DeepEqual(got, sampleHoldsPart) {
		t.Errorf("decoded %+v, %v, want %+v", got, err, sampleHoldsPart)
	}
	line("bus/feed-part-loading", sampleLoadPart.encode())
	if got, err := decodeFeedPart(sampleLoadPart.encode()); err != nil || !reflect.DeepEqual(got, sampleLoadPart) {
		t.Errorf("decoded %+v, %v, want %+v", got, err, sampleLoadPart)
	}
	f.AddEach("bus/report-part", sampleNodePart.Encode)
	line("bus/report-answer", driver.EncodePartAnswer(true))
	f.Compare(t)
}

// TestFullNodeInBothVersions: the older form of a report has no field for a node that is full of
// replicas, and says that its disk is full.
func TestFullNodeInBothVersions(t *testing.T) {
	older, newer := sampleNodePart, sampleNodePart
	older.Full, older.Used = false, older.Capacity
	older.NoSpace, older.Corrupt = false, false
	for v, want := range map[keyspace.Version]driver.Part{keyspace.VersionFullNodes - 1: older, keyspace.VersionFullNodes: newer} {
		if got, err := driver.DecodePart(sampleNodePart.Encode(v)); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("version %d: %+v, %v, want %+v", v, got, err, want)
		}
	}
}

func TestDecodeEachPrefix(t *testing.T) { testkit.Prefixes(t, decoderOf) }

// decoderOf returns the decoder for a golden value's name.
func decoderOf(name string) func([]byte) error {
	var kind requestKind
	switch {
	case strings.HasPrefix(name, "bus/request-"):
		return func(p []byte) error { _, err := decodeRequest(p); return err }
	case strings.HasPrefix(name, "bus/response-"):
		_, _ = fmt.Sscanf(name, "bus/response-%d", &kind)
		return func(p []byte) error { _, err := decodeResponse(kind, p); return err }
	}
	return map[string]func([]byte) error{
		"record/table": func(p []byte) error { _, err := DecodeNodeTable(p); return err },

		"bus/feed-request":      func(p []byte) error { _, err := decodeFeedRequest(p); return err },
		"bus/feed-part-alarms":  func(p []byte) error { _, err := decodeFeedPart(p); return err },
		"bus/feed-part-loading": func(p []byte) error { _, err := decodeFeedPart(p); return err },
		"bus/feed-part-holds":   func(p []byte) error { _, err := decodeFeedPart(p); return err },
		"bus/feed-part-access":  func(p []byte) error { _, err := decodeFeedPart(p); return err },
		"bus/feed-part":         func(p []byte) error { _, err := decodeFeedPart(p); return err },

		"bus/report-part@3": func(p []byte) error { _, err := driver.DecodePart(p); return err },
		"bus/report-part@4": func(p []byte) error { _, err := driver.DecodePart(p); return err },
		"bus/report-answer": func(p []byte) error { _, err := driver.DecodePartAnswer(p); return err },
	}[name]
}

func FuzzRequest(f *testing.F) {
	testkit.Fuzz(f, "bus/request", decodeRequest, func(q request) []byte { return q.encode() })
}

func FuzzResponse(f *testing.F) {
	for name, p := range testkit.Values(f) {
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
		if err != nil || k == 0 || k > requestLoad {
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
	whole.Rows = []*fsm.Range{{Descriptor: keyspace.Descriptor{Range: 1, Generation: 1, Replicas: sampleDescriptor.Replicas}, Changed: 10}}
	f.Add(whole.encode(), samplePart.encode())
	f.Add([]byte{}, encodeFeedRequest(1))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var r feedReceiver
		for _, p := range [][]byte{a, b} {
			m, err := r.receive(p)
			if err != nil {
				return
			}
			if m != nil && m.Check() != nil {
				t.Fatalf("a map that does not cover: %v", m.Check())
			}
		}
		_, _ = decodeFeedRequest(b)
	})
}

// FuzzFeedPart: a part of the feed, and a request for one, are the same after another
// trip.
func FuzzFeedPart(f *testing.F) {
	testkit.Fuzz(f, "bus/feed-part", decodeFeedPart, func(p feedPart) []byte { return p.encode() })
}

func FuzzFeedRequest(f *testing.F) {
	testkit.Fuzz(f, "bus/feed-request", decodeFeedRequest, encodeFeedRequest)
}

// FuzzNodePart: a part of a node's report is the same after another trip, and so is the
// answer.
func FuzzNodePart(f *testing.F) {
	testkit.Fuzz(f, "bus/report-part", driver.DecodePart, func(p driver.Part) []byte { return p.Encode(keyspace.NewestVersion) })
}

func FuzzPartAnswer(f *testing.F) {
	testkit.Fuzz(f, "bus/report-answer", driver.DecodePartAnswer, driver.EncodePartAnswer)
}

// A node table of an earlier build is refused by its version.
func TestAnotherVersionOfTheTableIsNamed(t *testing.T) {
	_, err := DecodeNodeTable([]byte{fsm.FormatVersion - 1, 0})
	var v *keyspace.VersionError
	if !errors.As(err, &v) || v.Found != fsm.FormatVersion-1 || v.Newest != fsm.FormatVersion {
		t.Error(err)
	}
}
