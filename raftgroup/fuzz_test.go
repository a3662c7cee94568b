package raftgroup

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"reflect"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/measure"
)

// FuzzFrameClaims: decoding allocates in proportion to a frame's size. Many entries of
// few bytes are the worst real case, and entries that are only claimed allocate nothing.
func FuzzFrameClaims(f *testing.F) {
	f.Add(sampleFrame()[frameHeaderBytes:])
	head := appendMessageHead(appendFrameHeader(nil, time.Second), 1, pb.MsgApp, 1, 2, 3)
	claim := binary.AppendUvarint(append(head, 1, 1, 1), 1<<40)
	f.Add(claim[frameHeaderBytes:])
	f.Add(append(claim, make([]byte, 300)...)[frameHeaderBytes:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if got := measure.Excess(len(b), func() { _, _ = decodeMessages(1, b) }); got != 0 {
			t.Fatalf("%d bytes allocated for %d that came", got, len(b))
		}
	})
}

// FuzzLiveness: an accepted liveness message keeps its meaning when it is encoded again.
func FuzzLiveness(f *testing.F) {
	f.Add(encodeLiveness(liveness{boot: 5, healthy: true, sequence: 9})[frameHeaderBytes:])
	f.Add(encodeLiveness(liveness{boot: 1})[frameHeaderBytes:])
	f.Add(encodeLiveness(liveness{boot: 2, connected: true, sequence: 1})[frameHeaderBytes:])
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := decodeLiveness(b)
		if err != nil {
			if !errors.Is(err, errFrame) {
				t.Fatal(err)
			}
			return
		}
		if again, err := decodeLiveness(encodeLiveness(l)[frameHeaderBytes:]); err != nil || !reflect.DeepEqual(again, l) {
			t.Fatalf("%+v became %+v, %v", l, again, err)
		}
	})
}

// FuzzSnapshotHeaderAgain: an accepted header is unchanged after encoding and decoding.
func FuzzSnapshotHeaderAgain(f *testing.F) {
	f.Add(encodeSnapshotHeader(&snapshotHeader{
		group: 1, from: 2, to: 3, term: 7, applied: engine.Applied{Index: 20, Term: 6, ConfIndex: 11, Replicas: voters(3), Payload: []byte("p")},
	}))
	f.Add([]byte{snapshotVersion, 1, 2, 3, 4})
	f.Fuzz(func(t *testing.T, b []byte) {
		var h *snapshotHeader
		var err error
		if got := measure.Excess(len(b), func() { h, err = decodeSnapshotHeader(b) }); got != 0 {
			t.Fatalf("%d bytes allocated for %d that came", got, len(b))
		}
		if err != nil {
			if !errors.Is(err, errSnapshotFormat) {
				t.Fatal(err)
			}
			return
		}
		again, err := decodeSnapshotHeader(encodeSnapshotHeader(h))
		if err != nil || !reflect.DeepEqual(h, again) {
			t.Fatalf("%+v became %+v, %v", h, again, err)
		}
	})
}

// FuzzConfEntry: any data of an entry that changes the configuration is applied or
// refused, in both of raft's forms.
func FuzzConfEntry(f *testing.F) {
	for _, changes := range [][]ConfChange{{{AddLearner, 4, 300}}, {{Type: Promote, Replica: 3}, {Type: RemoveReplica, Replica: 2}}, nil} {
		data, err := proto.Marshal(encodeConf(5, changes, []byte("payload")))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, true)
		f.Add(data, false)
	}
	f.Fuzz(func(t *testing.T, data []byte, v2 bool) {
		kind := pb.EntryConfChange
		if v2 {
			kind = pb.EntryConfChangeV2
		}
		var c appliedConf
		var err error
		if got := measure.Excess(len(data), func() { c, err = decodeConfEntry(&pb.Entry{Type: kind.Enum(), Data: data}) }); got != 0 {
			t.Fatalf("%d bytes allocated for %d that came", got, len(data))
		}
		if err == nil {
			_ = c.Apply(voters(3))
		}
	})
}

// tapeStream is the receiving end of a stream with prepared messages.
type tapeStream struct{ messages [][]byte }

func (s *tapeStream) Recv(context.Context) ([]byte, error) {
	if len(s.messages) == 0 {
		return nil, io.EOF
	}
	m := bytes.Clone(s.messages[0]) // a receiver may write to it
	s.messages = s.messages[1:]
	return m, nil
}

func (s *tapeStream) Send(context.Context, []byte) error { return nil }
func (s *tapeStream) Close(error)                        {}

// cutTape cuts bytes into messages, each with a length prefix of two bytes.
func cutTape(b []byte) (messages [][]byte) {
	for len(b) >= 2 {
		n := min(int(binary.BigEndian.Uint16(b)), len(b)-2)
		messages = append(messages, b[2:2+n])
		b = b[2+n:]
	}
	return messages
}

func appendTape(dst []byte, messages ...[]byte) []byte {
	for _, m := range messages {
		dst = append(binary.BigEndian.AppendUint16(dst, uint16(len(m))), m...)
	}
	return dst
}

// tableEnd ends a table of these bytes as the sender does.
func tableEnd(table string) []byte {
	b := binary.AppendUvarint([]byte{snapTable}, uint64(len(table)))
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum([]byte(table), castagnoli))
}

// FuzzSnapshotStream: arbitrary messages behind a snapshot's header end in an error with
// no file left on the disk, or in files that hold exactly the chunks of the correctly
// ended tables.
func FuzzSnapshotStream(f *testing.F) {
	e, err := engine.Open(engine.Options{FS: vfs.NewMem(), Dir: "data", Clock: clock.System(), BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		if err := e.Close(); err != nil {
			f.Error(err)
		}
	})
	chunk := func(s string) []byte { return append([]byte{snapChunk}, s...) }
	f.Add(appendTape(nil, chunk("one"), chunk("two"), tableEnd("onetwo"), chunk("x"), tableEnd("x"), []byte{snapEnd, 2}))
	f.Add(appendTape(nil, []byte{snapEnd, 0}))
	f.Add(appendTape(nil, chunk("one"), []byte{snapEnd, 1}))
	h := &Host{cfg: Config{Engine: e, Clock: clock.System()}}
	f.Fuzz(func(t *testing.T, tape []byte) {
		messages := cutTape(tape)
		ctx, cancel := context.WithCancel(t.Context())
		r := &incomingSnapshot{g: &Group{h: h, id: 1}, ctx: ctx, cancel: cancel}
		w := newWatchdog(ctx, h.cfg.Clock)
		err := w.end(r.fetchTables(w, &tapeStream{messages}))
		if err == nil {
			checkTables(t, h, r.paths, messages)
		}
		r.removeFiles()
		cancel()
		left, err := e.FS().List(e.StagingDir())
		if err != nil || len(left) > 0 {
			t.Fatalf("left behind: %v, %v", left, err)
		}
	})
}

// checkTables compares the files with the accepted messages.
func checkTables(t *testing.T, h *Host, paths []string, messages [][]byte) {
	t.Helper()
	var tables []string
	open := ""
	for _, m := range messages {
		switch m[0] {
		case snapChunk:
			open += string(m[1:])
		case snapTable:
			if !bytes.Equal(m, tableEnd(open)) && len(m) == len(tableEnd(open)) {
				t.Fatalf("table %q ends in %x", open, m)
			}
			tables, open = append(tables, open), ""
		case snapEnd:
			if len(tables) != len(paths) {
				t.Fatalf("%d tables, %d files", len(tables), len(paths))
			}
			for i, p := range paths {
				f, err := h.cfg.Engine.FS().Open(p)
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(f)
				if err = errors.Join(err, f.Close()); err != nil || string(got) != tables[i] {
					t.Fatalf("file %d has %q, want %q, %v", i, got, tables[i], err)
				}
			}
			return
		}
	}
	t.Fatal("accepted without an end")
}
