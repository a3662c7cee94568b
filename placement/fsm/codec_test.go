package fsm

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/internal/testkit"
	"github.com/skeindb/skein/rights"
)

var goldenDescriptor = keyspace.Descriptor{
	Range: 7, Generation: 3, ConfIndex: 21,
	Span:     keyspace.Span{Start: []byte("b"), End: []byte("d")},
	Replicas: []keyspace.Replica{{ID: 1, Node: 0xa1}, {ID: 4, Node: 0xa2, Role: keyspace.RoleLearner}},
}

var (
	goldenNode      = Node{ID: 0xa1, Name: "n1", PeerURLs: []string{"http://h1:2380"}, ClientURLs: []string{"http://h1:2379", "http://h2:2379"}, State: NodeDraining, Since: 1_800_000_000_000, Attributes: []Attribute{{"rack", "r1"}, {"zone", "a"}}, Instance: 0xabc, Build: "0.2.0", Reads: keyspace.Versions{Oldest: 3, Newest: 4}, ReadsSince: 1_800_000_000_000}
	goldenOperation = Operation{ID: 300, Range: 7, Kind: OperationMove, From: 0xa1, To: 0xa2, Lead: 0xa3, Replica: 9, Leaving: 4, Reason: decide.Repair, Why: "asked for"}
	goldenMerge     = Operation{ID: 302, Range: 9, Kind: OperationMerge, Right: 10, Phase: MergeCommitted, From: 0xa1, To: 0xa2, Replica: 11, Leaving: 5, Why: "asked for"}
	goldenLease     = Lease{
		ID: 0x7b, Incarnation: 44, TTL: 60, Revoking: true,
		Spans: []keyspace.Span{{End: []byte("b")}, {Start: []byte("d"), End: []byte("f")}, {Start: []byte("x")}},
	}
	goldenMeta   = meta{Cluster: 0xc1, Ceiling: 10_001, Compacted: -1, Settings: 2, NextRange: 12, NextReplica: 4, Changed: 33, NodesChanged: 30, ClusterVersion: 3}
	goldenUser   = rights.User{Name: "alice", Roles: []string{"r", "root"}, Hash: []byte("$2a$10$hash"), Since: 300}
	goldenRole   = rights.Role{Name: "r", Permissions: []rights.Permission{{Type: rights.Write, Key: []byte("a")}, {Type: rights.Type(-1), Key: []byte("a"), RangeEnd: []byte("b")}}}
	goldenRights = accessMeta{Meta: rights.Meta{Enabled: true, Revision: 9, EnabledSince: 290, Access: 301}, Changed: 302, Key: []byte{7, 8}}
	goldenAlarm  = Alarm{AlarmID{AlarmNoSpace, 0xa1}, true}
	goldenHold   = Hold{ID: 0xb0, Kind: "backup", Owner: "db7, process 1", Revision: 40, Made: 1_700_000_000_000, Expires: 1_800_000_000_000}
	goldenLoad   = Loading{Phase: PhaseFollow, Nonce: 0xa1b2, Source: "etcd a.db", Position: 300, Set: 0x5e7, Incarnation: 44, Started: 1_800_000_000_000, Changed: 301}
	goldenRange  = Range{Descriptor: goldenDescriptor, Preferred: 0xa2, Created: true, Kept: true, Changed: 33}
)

func sampleCommands() []Command {
	ops := []Effect{
		RaiseCeiling{To: 10_001},
		LowerCeiling{To: 57},
		Compact{At: 40},
		AllocateRanges{Count: 64},
		Report{Descriptors: []keyspace.Descriptor{goldenDescriptor}},
		PutNode{Change: NodeIsAdded, Now: 1_800_000_000_000, Node: goldenNode},
		MarkCreated{Ranges: []keyspace.RangeID{1, 2, 300}},
		PutSetting{Name: "alarm", Value: []byte("nospace")},
		GrantLease{ID: 0x7b, TTL: 60},
		RegisterLease{ID: -2, Span: keyspace.Span{Start: []byte("b"), End: []byte("d")}},
		RevokeLeases{Leases: []LeaseRef{{ID: 0x7b, Incarnation: 44}, {ID: -2}}},
		RemoveLeases{Leases: []LeaseRef{{ID: 0x7b, Incarnation: 44}}},
		BeginOperation{Generation: 3, ConfIndex: 21, Right: RangeVersion{4, 22}, Operation: Operation{Range: 7, Kind: OperationMove, From: 0xa1, To: 0xa2, Why: "asked for"}},
		EndOperation{Range: 7, ID: 300},
		SetNodeState{Node: 0xa1, From: NodeServing, To: NodeDraining, Now: 1_800_000_000_000},
		SetNodeState{Node: 0xa1, From: NodeServing, To: NodeDecommissioned, Leave: true, Beside: []keyspace.NodeID{0xa2, 0xa3}, Now: 1_800_000_000_000},
		RemoveNode{Node: 0xa1, Now: 1_800_000_000_000},
		AlignMerge{MergeRef{7, 300}, 0xa1, 0xa2},
		CommitMerge{MergeRef{7, 300}, RangeVersion{3, 21}, RangeVersion{4, 22}},
		AbortMerge{MergeRef{7, 300}},
		KeepBorder{Key: []byte("m")},
		BindMerge{MergeRef{7, 300}},
		RaiseVersion{To: 4},
		ChangeAccess{Caller: "root", Change: rights.Change{Kind: rights.AddUser, User: "alice", Hash: []byte("$2a$10$hash")}},
		ChangeAccess{Caller: "root", Change: rights.Change{Kind: rights.GrantPermission, Role: "r", Permission: rights.Permission{Type: rights.ReadWrite, Key: []byte("a"), RangeEnd: []byte("b")}}},
		ChangeAlarm{Change: AlarmActivated, Alarm: AlarmID{AlarmNoSpace, 0xa1}},
		ChangeAlarm{Change: AlarmPassed, Alarm: AlarmID{-1, 0}},
		Guarded{Permit: 302, Op: Compact{At: 40}},
		RevokeChecked{Lease: LeaseRef{ID: 0x7b, Incarnation: 44}, At: 57},
		KeepLease{Lease: LeaseRef{ID: 0x7b, Incarnation: 44}, At: 57},
		PutHold{Create: true, ID: 0xb0, Kind: "backup", Owner: "db7, process 1", Revision: 40, Now: 1_800_000_000_000, Life: time.Hour},
		EndHold{ID: 0xb0, Expires: 1_800_000_000_000},
		ChangeLoad{Step: LoadBegin, Nonce: 0xa1b2, Source: "etcd a.db", Now: 1_800_000_000_000},
		ChangeLoad{Step: LoadAdvance, Nonce: 0xa1b2, Phase: PhaseFollow, Position: 300},
		ChangeLoad{Step: LoadGrant, Nonce: 0xa1b2, Leases: []LoadedLease{{ID: 0x7b, TTL: 60}, {ID: -2, TTL: 61}}},
		ChangeLoad{Step: LoadRegister, Nonce: 0xa1b2, Leases: []LoadedLease{{ID: -2, Spans: []keyspace.Span{{Start: []byte("b"), End: []byte("d")}}}}},
		ChangeLoad{Step: LoadFinish, Nonce: 0xa1b2, Position: 310, Compacted: 200, Set: 0x5e7},
		ChangeLoad{Step: LoadAccess, Nonce: 0xa1b2, Set: 0x5e7, Access: []AccessRow{{Key: []byte("a"), Value: []byte{1}}, {Key: []byte("ualice"), Value: []byte{1, 2}}}, Key: []byte("secret")},
		GrantLeaseIn{ID: 0x7b, TTL: 60, Span: keyspace.Span{Start: []byte("b"), End: []byte("d")}},
		RegisterLeases{Leases: []RegisterLease{{ID: 0x7b, Span: keyspace.Span{Start: []byte("b"), End: []byte("d")}}, {ID: -2}}},
	}
	cs := make([]Command, len(ops))
	for i, op := range ops {
		cs[i] = Command{Term: 6, Boot: 0xb001, Number: uint64(i + 1), Op: op}
	}
	return cs
}

// TestFormats compares the bytes of commands and records with testdata/golden.txt, and
// decodes them again. A change there is a change of the format: docs/format/placement.md
// and FormatVersion change with it.
func TestFormats(t *testing.T) {
	var f testkit.File
	for _, c := range sampleCommands() {
		p := c.Encode()
		f.Add(fmt.Sprintf("command/%T", c.Op), p)
		if got, err := DecodeCommand(p); err != nil || !reflect.DeepEqual(got, c) {
			t.Errorf("decoded %+v, %v, want %+v", got, err, c)
		}
	}
	f.Add("record/meta", appendMeta(nil, &goldenMeta))
	f.Add("record/node", AppendNode([]byte{FormatVersion}, &goldenNode))
	f.Add("record/range", AppendRange([]byte{FormatVersion}, &goldenRange))
	f.Add("record/setting", AppendBytes([]byte{FormatVersion}, []byte("nospace")))
	f.Add("record/lease", appendLease([]byte{FormatVersion}, &goldenLease))
	checked := goldenLease
	checked.Checked = 57
	f.Add("record/lease-checked", appendLease([]byte{FormatVersion}, &checked))
	f.Add("record/operation", AppendOperation([]byte{FormatVersion}, &goldenOperation))
	f.Add("record/operation-merge", AppendOperation([]byte{FormatVersion}, &goldenMerge))
	f.Add("record/user", appendUser([]byte{FormatVersion}, &goldenUser))
	f.Add("record/role", appendRole([]byte{FormatVersion}, &goldenRole))
	f.Add("record/access", appendAccessMeta([]byte{FormatVersion}, &goldenRights))
	f.Add("record/alarm", appendAlarm([]byte{FormatVersion}, goldenAlarm))
	f.Add("record/hold", appendHold([]byte{FormatVersion}, goldenHold))
	f.Add("record/loading", AppendLoading([]byte{FormatVersion}, &goldenLoad))
	f.Compare(t)
}

func TestDecodeEachPrefix(t *testing.T) { testkit.Prefixes(t, decoderOf) }

// decoderOf returns the decoder for a golden form's name.
func decoderOf(name string) func([]byte) error {
	if strings.HasPrefix(name, "command/") {
		return func(p []byte) error { _, err := DecodeCommand(p); return err }
	}
	return map[string]func([]byte) error{
		"record/meta":            func(p []byte) error { _, err := decodeMeta(p); return err },
		"record/node":            func(p []byte) error { _, err := decodeNode(p); return err },
		"record/range":           func(p []byte) error { _, err := decodeRange(p); return err },
		"record/lease":           func(p []byte) error { _, err := decodeLease(p); return err },
		"record/lease-checked":   func(p []byte) error { _, err := decodeLease(p); return err },
		"record/operation":       func(p []byte) error { _, err := decodeOperation(p); return err },
		"record/operation-merge": func(p []byte) error { _, err := decodeOperation(p); return err },
		"record/user":            func(p []byte) error { _, err := decodeUser(p); return err },
		"record/role":            func(p []byte) error { _, err := decodeRole(p); return err },
		"record/access":          func(p []byte) error { _, err := decodeAccessMeta(p); return err },
		"record/alarm":           func(p []byte) error { _, err := decodeAlarm(p); return err },
		"record/hold":            func(p []byte) error { _, err := decodeHold(p); return err },
		"record/loading":         func(p []byte) error { _, err := decodeLoading(p); return err },
		"record/setting":         func(p []byte) error { _, err := decodeSetting(p); return err },
	}[name]
}

func FuzzCommand(f *testing.F) {
	testkit.Fuzz(f, "command/", DecodeCommand, func(c Command) []byte { return c.Encode() })
}

func FuzzMeta(f *testing.F) {
	testkit.Fuzz(f, "record/meta", decodeMeta, func(m meta) []byte { return appendMeta(nil, &m) })
}

func FuzzNode(f *testing.F) {
	testkit.Fuzz(f, "record/node", decodeNode, func(n Node) []byte { return AppendNode([]byte{FormatVersion}, &n) })
}

func FuzzRange(f *testing.F) {
	testkit.Fuzz(f, "record/range", decodeRange, func(g Range) []byte { return AppendRange([]byte{FormatVersion}, &g) })
}

func FuzzSetting(f *testing.F) {
	testkit.Fuzz(f, "record/setting", decodeSetting, func(v []byte) []byte { return AppendBytes([]byte{FormatVersion}, v) })
}

func FuzzOperation(f *testing.F) {
	testkit.Fuzz(f, "record/operation", decodeOperation, func(o Operation) []byte { return AppendOperation([]byte{FormatVersion}, &o) })
}

func FuzzUser(f *testing.F) {
	testkit.Fuzz(f, "record/user", decodeUser, func(u rights.User) []byte { return appendUser([]byte{FormatVersion}, &u) })
}

func FuzzRole(f *testing.F) {
	testkit.Fuzz(f, "record/role", decodeRole, func(r rights.Role) []byte { return appendRole([]byte{FormatVersion}, &r) })
}

func FuzzAccess(f *testing.F) {
	testkit.Fuzz(f, "record/access", decodeAccessMeta, func(m accessMeta) []byte { return appendAccessMeta([]byte{FormatVersion}, &m) })
}

func FuzzLoading(f *testing.F) {
	testkit.Fuzz(f, "record/loading", decodeLoading, func(l Loading) []byte { return AppendLoading([]byte{FormatVersion}, &l) })
}

func FuzzAlarm(f *testing.F) {
	testkit.Fuzz(f, "record/alarm", decodeAlarm, func(a Alarm) []byte { return appendAlarm([]byte{FormatVersion}, a) })
}

func FuzzHold(f *testing.F) {
	testkit.Fuzz(f, "record/hold", decodeHold, func(h Hold) []byte { return appendHold([]byte{FormatVersion}, h) })
}

func FuzzLease(f *testing.F) {
	testkit.Fuzz(f, "record/lease", decodeLease, func(l Lease) []byte { return appendLease([]byte{FormatVersion}, &l) })
}
