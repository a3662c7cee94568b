package raftgroup

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

func heartbeatFor(to uint64) *pb.Message {
	return &pb.Message{
		Type: pb.MsgHeartbeat.Enum(), To: ptr(to), From: ptr(to + 1), Term: ptr(uint64(7)), Commit: ptr(uint64(300)),
		Index: ptr(uint64(290)), Context: []byte("12345678"),
	}
}

// sampleMessages returns one message of each kind, with all its fields set.
func sampleMessages() []*pb.Message {
	base := func(t pb.MessageType) *pb.Message {
		return &pb.Message{Type: t.Enum(), To: ptr(uint64(1)), From: ptr(uint64(300)), Term: ptr(uint64(6))}
	}
	app := base(pb.MsgApp)
	app.Index, app.LogTerm, app.Commit = ptr(uint64(10)), ptr(uint64(5)), ptr(uint64(9))
	app.Entries = []*pb.Entry{
		{Type: pb.EntryNormal.Enum(), Term: ptr(uint64(6)), Index: ptr(uint64(11))},
		{Type: pb.EntryNormal.Enum(), Term: ptr(uint64(6)), Index: ptr(uint64(12)), Data: []byte("data")},
		{Type: pb.EntryConfChangeV2.Enum(), Term: ptr(uint64(6)), Index: ptr(uint64(13)), Data: []byte("conf")},
	}
	ack := base(pb.MsgAppResp)
	ack.Reject, ack.Index = ptr(false), ptr(uint64(13))
	nack := base(pb.MsgAppResp)
	nack.Reject, nack.Index, nack.RejectHint, nack.LogTerm = ptr(true), ptr(uint64(20)), ptr(uint64(13)), ptr(uint64(5))
	vote := base(pb.MsgVote)
	vote.Index, vote.LogTerm, vote.Context = ptr(uint64(13)), ptr(uint64(6)), []byte(transferVoteBytes)
	pre := base(pb.MsgPreVote)
	pre.Index, pre.LogTerm = ptr(uint64(13)), ptr(uint64(6))
	granted, refused := base(pb.MsgVoteResp), base(pb.MsgPreVoteResp)
	granted.Reject, refused.Reject = ptr(false), ptr(true)
	beat := base(pb.MsgHeartbeat)
	beat.Commit, beat.Index, beat.Context = ptr(uint64(13)), ptr(uint64(12)), []byte("number..raftctx.")
	echo := base(pb.MsgHeartbeatResp)
	echo.Context = []byte("number..")
	read, index := base(pb.MsgReadIndex), base(pb.MsgReadIndexResp)
	read.Entries = []*pb.Entry{{Data: []byte("context of a read")}}
	index.Entries, index.Index = read.Entries, ptr(uint64(13))
	return []*pb.Message{app, ack, nack, vote, pre, granted, refused, beat, echo, base(pb.MsgTimeoutNow), read, index}
}

func sampleFrame() []byte {
	b := appendFrameHeader(nil, time.Second)
	for i, m := range sampleMessages() {
		b = appendRaftMessage(b, keyspace.GroupID(i+1), m)
	}
	b = appendHostMessage(b, &message{group: keyspace.PlacementGroup, kind: kindSleep, to: 1, from: 2, term: 6, commit: 13, number: 1 << 60})
	b = appendHostMessage(b, &message{group: 1, kind: kindWake, to: 1, from: 2, term: 6})
	b = appendHostMessage(b, &message{group: 1, kind: kindRemoved, to: 1, from: 2, term: 6})
	return appendHostMessage(b, &message{group: 1, kind: kindCommitNotice, to: 1, from: 2, term: 6, commit: 300})
}

func TestCodecRoundTrip(t *testing.T) {
	frame := sampleFrame()
	msgs, err := decodeMessages(9, frame[2:])
	if err != nil {
		t.Fatal(err)
	}
	again := appendFrameHeader(nil, msgs[0].promise)
	for i, want := range sampleMessages() {
		m := msgs[i]
		if m.group != keyspace.GroupID(i+1) || m.node != 9 || m.promise != time.Second || m.from != 300 || m.term != 6 {
			t.Errorf("%d: %+v", i, m)
		}
		if !proto.Equal(m.raft, want) {
			t.Errorf("%s:\n got %v\nwant %v", want.GetType(), m.raft, want)
		}
	}
	for i := range msgs {
		if msgs[i].raft != nil {
			again = appendRaftMessage(again, msgs[i].group, msgs[i].raft)
		} else {
			again = appendHostMessage(again, &msgs[i])
		}
	}
	if !bytes.Equal(again, frame) {
		t.Fatalf("encoded again:\n%x\n%x", again, frame)
	}
	// No entry keeps the frame.
	data := msgs[0].raft.GetEntries()[1].GetData()
	clear(frame)
	if string(data) != "data" {
		t.Fatal("an entry refers to the frame")
	}
}

var rewrite = flag.Bool("rewrite-golden", false, "write the golden files anew")

// TestGoldenFormats compares the bytes of every format with the golden file.
// docs/format/raftgroup.md describes them.
func TestGoldenFormats(t *testing.T) {
	var s strings.Builder
	put := func(name string, b []byte) { fmt.Fprintf(&s, "%s\n%s", name, hex.Dump(b)) }
	for i, m := range sampleMessages() {
		put(fmt.Sprintf("frame with one %s (%d)", m.GetType(), i), appendRaftMessage(appendFrameHeader(nil, time.Second), 1, m))
	}
	put("frame with a sleep notice", appendHostMessage(appendFrameHeader(nil, time.Second),
		&message{group: 1, kind: kindSleep, to: 1, from: 2, term: 6, commit: 13, number: 0x0102030405060708}))
	put("frame with a wake", appendHostMessage(appendFrameHeader(nil, time.Second), &message{group: 1, kind: kindWake, to: 1, from: 2, term: 6}))
	put("frame with a removed", appendHostMessage(appendFrameHeader(nil, time.Second), &message{group: 1, kind: kindRemoved, to: 1, from: 2, term: 6}))
	put("frame with a commit notice", appendHostMessage(appendFrameHeader(nil, time.Second),
		&message{group: 1, kind: kindCommitNotice, to: 1, from: 2, term: 6, commit: 300}))
	put("liveness", encodeLiveness(liveness{boot: 0x0102030405060708, healthy: true, sequence: 300}))
	put("liveness of a node that hears two others", encodeLiveness(liveness{boot: 2, healthy: true, connected: true, sequence: 7, heard: []keyspace.NodeID{3, 0x0102030405060708}}))
	put("liveness of a node whose disk stands still", encodeLiveness(liveness{boot: 1, sequence: 1}))
	put("snapshot header", encodeSnapshotHeader(&snapshotHeader{
		group: 1, from: 2, to: 3, term: 7, applied: engine.Applied{Index: 20, Term: 6, ConfIndex: 10, Replicas: voters(2), Payload: []byte("p")},
	}))
	put("context of a configuration change", encodeConf(0x0102030405060708,
		[]ConfChange{{AddLearner, 4, 300}, {Type: Promote, Replica: 3}}, []byte("payload")).GetContext())
	path := filepath.Join("testdata", "formats.golden")
	if *rewrite {
		if err := os.WriteFile(path, []byte(s.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if s.String() != string(want) {
		t.Fatalf("formats have changed:\n%s", s.String())
	}
}

// TestCodecDamage decodes every prefix of a frame, and every frame with one byte changed:
// each is decoded or refused without a panic.
func TestCodecDamage(t *testing.T) {
	frame := sampleFrame()[2:]
	for i := range frame {
		_, _ = decodeMessages(1, frame[:i])
		for _, x := range []byte{0x01, 0x80, 0xff} {
			b := bytes.Clone(frame)
			b[i] ^= x
			_, _ = decodeMessages(1, b)
		}
	}
	l := encodeLiveness(liveness{boot: 5, healthy: true, sequence: 9})[2:]
	for i := range l {
		if _, err := decodeLiveness(l[:i]); err == nil {
			t.Fatalf("%d bytes of a liveness message are accepted", i)
		}
	}
}

// TestCodecClaims: a frame that claims many entries allocates in proportion to its size.
func TestCodecClaims(t *testing.T) {
	b := appendMessageHead(appendFrameHeader(nil, time.Second), 1, pb.MsgApp, 1, 2, 3)
	b = append(b, 1, 1, 1)
	b = append(b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f)
	allocs := testing.AllocsPerRun(10, func() { _, _ = decodeMessages(1, b[2:]) })
	if allocs > 10 {
		t.Fatalf("%v allocations", allocs)
	}
}

func FuzzFrame(f *testing.F) {
	f.Add(sampleFrame())
	f.Add(encodeLiveness(liveness{boot: 5, healthy: true, sequence: 9}))
	f.Fuzz(func(t *testing.T, b []byte) {
		kind, rest, err := frameKind(b)
		if err != nil {
			return
		}
		if kind == frameLiveness {
			_, _ = decodeLiveness(rest)
			return
		}
		msgs, err := decodeMessages(1, rest)
		if err != nil {
			return
		}
		// An accepted frame can be encoded again, with the same meaning.
		again := appendFrameHeader(nil, 0)
		for i := range msgs {
			if msgs[i].raft != nil {
				again = appendRaftMessage(again, msgs[i].group, msgs[i].raft)
			} else {
				again = appendHostMessage(again, &msgs[i])
			}
		}
		same, err := decodeMessages(1, again[2:])
		if err != nil || len(same) != len(msgs) {
			t.Fatalf("%d messages, again %d: %v", len(msgs), len(same), err)
		}
		for i := range msgs {
			if msgs[i].raft != nil && !proto.Equal(msgs[i].raft, same[i].raft) {
				t.Fatalf("%v\n%v", msgs[i].raft, same[i].raft)
			}
		}
	})
}

func FuzzSnapshotHeader(f *testing.F) {
	f.Add(encodeSnapshotHeader(&snapshotHeader{group: 1, from: 2, to: 3, term: 7, applied: engine.Applied{Index: 20, Term: 6, Replicas: voters(2)}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := decodeSnapshotHeader(b); err == nil {
			if _, err := decodeSnapshotHeader(encodeSnapshotHeader(h)); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func FuzzConfContext(f *testing.F) {
	f.Add(encodeConf(5, []ConfChange{{AddLearner, 4, 300}}, []byte("payload")).GetContext())
	f.Fuzz(func(t *testing.T, ctx []byte) {
		data, err := proto.Marshal(&pb.ConfChangeV2{Context: ctx, Changes: []*pb.ConfChangeSingle{{NodeId: ptr(uint64(4))}}})
		if err != nil {
			t.Skip()
		}
		c, err := decodeConfEntry(&pb.Entry{Type: pb.EntryConfChangeV2.Enum(), Data: data})
		if err == nil {
			_ = c.Apply(voters(3))
		}
	})
}

// TestCodecRefusesTermZero: raft takes a message of term 0 for its own host's. A
// heartbeat without a term would be answered without a promise.
func TestCodecRefusesTermZero(t *testing.T) {
	for _, kind := range []pb.MessageType{pb.MsgHeartbeat, pb.MsgApp, pb.MsgVote, pb.MsgTimeoutNow, pb.MsgAppResp} {
		m := &pb.Message{Type: kind.Enum(), To: ptr(uint64(1)), From: ptr(uint64(2)), Term: ptr(uint64(0)), Context: make([]byte, numberBytes)}
		frame := appendRaftMessage(appendFrameHeader(nil, time.Second), 1, m)
		_, rest, err := frameKind(frame)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeMessages(2, rest); !errors.Is(err, errFrame) {
			t.Errorf("%s of term 0: %v", kind, err)
		}
	}
}
