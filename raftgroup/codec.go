package raftgroup

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// docs/format/raftgroup.md describes the bytes of frames.
const (
	frameVersion      = 5
	frameMessages     = 1
	frameLiveness     = 2
	frameHeaderBytes  = 2
	contextBytesMax   = 64 // of a vote or a heartbeat
	numberBytes       = 8  // the host's clock reading in front of raft's heartbeat context
	raftContextBytes  = 8  // raft's own heartbeat context, if present
	readContextBytes  = 16 // the context that the host gives raft with a ReadIndex
	promiseMax        = time.Hour
	livenessHealthy   = 1 << 0
	livenessConnected = 1 << 1
	entryBytesMin     = 3
	hostKindFirst     = pb.MessageType(64)
	kindSleep         = hostKindFirst + 0
	kindWake          = hostKindFirst + 1
	kindRemoved       = hostKindFirst + 2
	kindCommitNotice  = hostKindFirst + 3
	transferVoteBytes = "CampaignTransfer" // raft's context of a vote that a transfer asked for
)

// errFrame says that bytes from the bus are no frame of this version.
var errFrame = errors.New("raftgroup: malformed frame")

// message is a frame's content for one replica: a message of raft, or one of the host's
// own kinds, for which raft is nil.
type message struct {
	group    keyspace.GroupID
	kind     pb.MessageType
	to, from keyspace.ReplicaID
	term     uint64
	// commit is set in kindSleep and kindCommitNotice, number in kindSleep.
	commit, number uint64
	// behind has the message leave in the frame of entries. It is not in the frame.
	behind bool
	raft   *pb.Message
	// promise is how long the sender's host keeps the promises that its heartbeat
	// responses give; node is the sender's node. Both hold for the whole frame.
	promise time.Duration
	node    keyspace.NodeID
	// bytes is the accounted size of the entries.
	bytes int64
}

// Heartbeat responses and votes allocate nothing of their own: all messages of a frame,
// with everything that their pointer fields point to, share one slab.
type messageSlot struct {
	m                                            pb.Message
	to, from, term, index, logTerm, commit, hint uint64
	reject                                       bool
}

// entrySlot does the same for the entries of one message.
type entrySlot struct {
	e           pb.Entry
	term, index uint64
}

// Raft never writes through the Type pointers, so all messages share these.
var (
	messageTypes = func() (t [32]pb.MessageType) {
		for i := range t {
			t[i] = pb.MessageType(i)
		}
		return t
	}()
	entryTypes = [3]pb.EntryType{pb.EntryNormal, pb.EntryConfChange, pb.EntryConfChangeV2}
)

// appendFrameHeader begins a frame of messages.
func appendFrameHeader(dst []byte, promise time.Duration) []byte {
	dst = append(dst, frameVersion, frameMessages)
	return binary.AppendUvarint(dst, uint64(promise/time.Millisecond))
}

// appendHostMessage appends one message of the host's own kinds.
func appendHostMessage(dst []byte, m *message) []byte {
	dst = appendMessageHead(dst, m.group, m.kind, uint64(m.to), uint64(m.from), m.term)
	switch m.kind {
	case kindSleep:
		dst = binary.AppendUvarint(dst, m.commit)
		dst = binary.LittleEndian.AppendUint64(dst, m.number)
	case kindCommitNotice:
		dst = binary.AppendUvarint(dst, m.commit)
	default: // nothing else
	}
	return dst
}

func appendMessageHead(dst []byte, g keyspace.GroupID, t pb.MessageType, to, from, term uint64) []byte {
	dst = binary.AppendUvarint(dst, uint64(g))
	dst = append(dst, byte(t))
	dst = binary.AppendUvarint(dst, to)
	dst = binary.AppendUvarint(dst, from)
	return binary.AppendUvarint(dst, term)
}

// appendRaftMessage appends one raft message. It panics on a type that never leaves a
// host.
func appendRaftMessage(dst []byte, g keyspace.GroupID, m *pb.Message) []byte {
	dst = appendMessageHead(dst, g, m.GetType(), m.GetTo(), m.GetFrom(), m.GetTerm())
	switch m.GetType() {
	case pb.MsgApp:
		dst = binary.AppendUvarint(dst, m.GetIndex())
		dst = binary.AppendUvarint(dst, m.GetLogTerm())
		dst = binary.AppendUvarint(dst, m.GetCommit())
		dst = appendEntries(dst, m)
	case pb.MsgAppResp:
		dst = append(dst, wire.Flag(m.GetReject(), 1))
		dst = binary.AppendUvarint(dst, m.GetIndex())
		if m.GetReject() {
			dst = binary.AppendUvarint(dst, m.GetRejectHint())
			dst = binary.AppendUvarint(dst, m.GetLogTerm())
		}
	case pb.MsgVote, pb.MsgPreVote:
		dst = binary.AppendUvarint(dst, m.GetIndex())
		dst = binary.AppendUvarint(dst, m.GetLogTerm())
		dst = wire.AppendBytes(dst, m.GetContext())
	case pb.MsgVoteResp, pb.MsgPreVoteResp:
		dst = append(dst, wire.Flag(m.GetReject(), 1))
	case pb.MsgHeartbeat:
		dst = binary.AppendUvarint(dst, m.GetCommit())
		dst = binary.AppendUvarint(dst, m.GetIndex()) // the follower need, see truncate.go
		dst = wire.AppendBytes(dst, m.GetContext())
	case pb.MsgHeartbeatResp:
		dst = wire.AppendBytes(dst, m.GetContext())
	case pb.MsgTimeoutNow:
	case pb.MsgReadIndex, pb.MsgReadIndexResp:
		dst = binary.AppendUvarint(dst, m.GetIndex())
		dst = wire.AppendBytes(dst, m.GetEntries()[0].GetData())
	default:
		panic(fmt.Sprintf("raftgroup: group %s sends a %s", g, m.GetType()))
	}
	return dst
}

// appendEntries appends the entries of a MsgApp. Their indexes follow from the message's
// index.
func appendEntries(dst []byte, m *pb.Message) []byte {
	bytes := binary.MaxVarintLen64
	for _, e := range m.GetEntries() {
		bytes += 1 + 2*binary.MaxVarintLen64 + len(e.GetData())
	}
	dst = slices.Grow(dst, bytes)
	dst = binary.AppendUvarint(dst, uint64(len(m.GetEntries())))
	for i, e := range m.GetEntries() {
		if want := m.GetIndex() + 1 + uint64(i); e.GetIndex() != want {
			panic(fmt.Sprintf("raftgroup: entry %d at place of %d in a MsgApp", e.GetIndex(), want))
		}
		dst = append(dst, byte(e.GetType()))
		dst = binary.AppendUvarint(dst, e.GetTerm())
		dst = wire.AppendBytes(dst, e.GetData())
	}
	return dst
}

// frameKind checks version and kind of a frame and returns the rest.
func frameKind(frame []byte) (kind byte, rest []byte, err error) {
	if len(frame) < frameHeaderBytes {
		return 0, nil, fmt.Errorf("%w: %d bytes", errFrame, len(frame))
	}
	if frame[0] != frameVersion {
		return 0, nil, fmt.Errorf("%w: version %d, want %d", errFrame, frame[0], frameVersion)
	}
	return frame[1], frame[frameHeaderBytes:], nil
}

// decodeMessages decodes the messages of a frame. It copies the entries' data, so that a
// kept entry does not keep the frame; everything else is small and refers to one slab.
func decodeMessages(node keyspace.NodeID, rest []byte) ([]message, error) {
	r := wire.NewReader(rest)
	promiseMS := r.Uvarint()
	if promiseMS > uint64(promiseMax/time.Millisecond) {
		r.Failf("a promise of %d ms", promiseMS)
	}
	n, err := countMessages(r)
	if err != nil {
		return nil, fmt.Errorf("%w: from node %s: %w", errFrame, node, err)
	}
	msgs := make([]message, n)
	slots := make([]messageSlot, n)
	for i := range msgs {
		msgs[i].node, msgs[i].promise = node, time.Duration(promiseMS)*time.Millisecond
		decodeMessage(&r, &msgs[i], &slots[i])
	}
	if err := r.Err(); err != nil {
		return nil, fmt.Errorf("%w: from node %s: %w", errFrame, node, err)
	}
	return msgs, nil
}

// countMessages walks once over the frame without an allocation, so that the
// slab is exactly as large as what has really arrived.
func countMessages(r wire.Reader) (int, error) {
	n := 0
	for r.Len() > 0 {
		skipMessage(&r)
		n++
	}
	return n, r.Err()
}

// skipMessage is decodeMessage without the memory.
func skipMessage(r *wire.Reader) {
	r.Uvarint()
	t := pb.MessageType(r.Byte())
	r.Uvarint()
	r.Uvarint()
	r.Uvarint()
	switch t {
	case pb.MsgApp:
		r.Uvarint()
		r.Uvarint()
		r.Uvarint()
		for n := r.Uvarint(); n > 0 && r.OK(); n-- {
			r.Byte()
			r.Uvarint()
			r.BytesUpTo(r.Len())
		}
	case pb.MsgAppResp:
		reject := r.Bool()
		r.Uvarint()
		if reject {
			r.Uvarint()
			r.Uvarint()
		}
	case pb.MsgVote, pb.MsgPreVote, pb.MsgHeartbeat:
		r.Uvarint()
		r.Uvarint()
		r.BytesUpTo(contextBytesMax)
	case pb.MsgVoteResp, pb.MsgPreVoteResp:
		r.Bool()
	case pb.MsgHeartbeatResp:
		r.BytesUpTo(contextBytesMax)
	case pb.MsgTimeoutNow, kindWake, kindRemoved:
	case pb.MsgReadIndex, pb.MsgReadIndexResp:
		r.Uvarint()
		r.BytesUpTo(contextBytesMax)
	case kindSleep:
		r.Uvarint()
		r.Uint64LE()
	case kindCommitNotice:
		r.Uvarint()
	default:
		r.Failf("a message of kind %d", t)
	}
}

// decodeMessage decodes one message into m and s. Its layout is skipMessage's.
func decodeMessage(r *wire.Reader, m *message, s *messageSlot) {
	m.group = keyspace.GroupID(r.Uvarint())
	m.kind = pb.MessageType(r.Byte())
	s.to, s.from, s.term = r.Uvarint(), r.Uvarint(), r.Uvarint()
	m.to, m.from, m.term = keyspace.ReplicaID(s.to), keyspace.ReplicaID(s.from), s.term
	if m.group == 0 || s.to == 0 || s.from == 0 || s.to == s.from ||
		s.to >= localTargetMin || s.from >= localTargetMin {
		r.Failf("a message of group %d from replica %d to %d", m.group, s.from, s.to)
		return
	}
	if m.kind >= hostKindFirst {
		decodeHostMessage(r, m)
		return
	}
	// Raft takes a message without a term for one of its own host's. Only forwarded reads
	// have none.
	if int(m.kind) >= len(messageTypes) || s.term == 0 && m.kind != pb.MsgReadIndex {
		r.Failf("a message of kind %d in term %d", m.kind, s.term)
		return
	}
	s.m.Type, s.m.To, s.m.From, s.m.Term = &messageTypes[m.kind], &s.to, &s.from, &s.term
	m.raft = &s.m
	decodeRaftBody(r, m, s)
}

// localTargetMin is the smallest id that raft uses for its local threads.
const localTargetMin = ^uint64(0) - 1

func decodeHostMessage(r *wire.Reader, m *message) {
	switch m.kind {
	case kindSleep:
		m.commit, m.number = r.Uvarint(), r.Uint64LE()
	case kindCommitNotice:
		m.commit = r.Uvarint()
	case kindWake, kindRemoved:
	default:
		r.Failf("a message of kind %d", m.kind)
	}
}

func decodeRaftBody(r *wire.Reader, m *message, s *messageSlot) {
	switch m.kind {
	case pb.MsgApp:
		s.index, s.logTerm, s.commit = r.Uvarint(), r.Uvarint(), r.Uvarint()
		s.m.Index, s.m.LogTerm, s.m.Commit = &s.index, &s.logTerm, &s.commit
		decodeEntries(r, m, s)
	case pb.MsgAppResp:
		s.reject = r.Bool()
		s.index = r.Uvarint()
		s.m.Reject, s.m.Index = &s.reject, &s.index
		if s.reject {
			s.hint, s.logTerm = r.Uvarint(), r.Uvarint()
			s.m.RejectHint, s.m.LogTerm = &s.hint, &s.logTerm
		}
	case pb.MsgVote, pb.MsgPreVote:
		s.index, s.logTerm = r.Uvarint(), r.Uvarint()
		s.m.Index, s.m.LogTerm = &s.index, &s.logTerm
		s.m.Context = r.BytesUpTo(contextBytesMax)
	case pb.MsgVoteResp, pb.MsgPreVoteResp:
		s.reject = r.Bool()
		s.m.Reject = &s.reject
	case pb.MsgHeartbeat:
		s.commit, s.index = r.Uvarint(), r.Uvarint()
		s.m.Commit, s.m.Index = &s.commit, &s.index
		s.m.Context = heartbeatContext(r)
	case pb.MsgHeartbeatResp:
		s.m.Context = heartbeatContext(r)
	case pb.MsgTimeoutNow:
	case pb.MsgReadIndex, pb.MsgReadIndexResp:
		s.index = r.Uvarint()
		if m.kind == pb.MsgReadIndexResp {
			s.m.Index = &s.index
		}
		s.m.Entries = []*pb.Entry{{Data: r.BytesUpTo(contextBytesMax)}}
	default:
		r.Failf("a message of kind %d", m.kind)
	}
}

// heartbeatContext reads a heartbeat's context: the host's number, then nothing or raft's
// own eight bytes. Raft reads those without checking the length, so no other length may
// reach it.
func heartbeatContext(r *wire.Reader) []byte {
	c := r.BytesUpTo(contextBytesMax)
	if len(c) != numberBytes && len(c) != numberBytes+raftContextBytes {
		r.Failf("a heartbeat context of %d bytes", len(c))
		return nil
	}
	return c
}

// decodeEntries decodes the entries of a MsgApp into one slab, one array of
// pointers and one array of bytes. The count of entries was proven by
// countMessages, so it is not a mere claim.
func decodeEntries(r *wire.Reader, m *message, s *messageSlot) {
	n := r.Count(entryBytesMin)
	if n == 0 {
		return
	}
	slots, ents := make([]entrySlot, n), make([]*pb.Entry, n)
	for i := range slots {
		e := &slots[i]
		t := r.Byte()
		if int(t) >= len(entryTypes) {
			r.Failf("an entry of type %d", t)
			return
		}
		e.term, e.index = r.Uvarint(), s.index+1+uint64(i)
		e.e.Type, e.e.Term, e.e.Index = &entryTypes[t], &e.term, &e.index
		e.e.Data = r.BytesUpTo(r.Len())
		m.bytes += int64(len(e.e.Data))
		ents[i] = &e.e
	}
	if !r.OK() {
		return
	}
	data := make([]byte, 0, m.bytes)
	for _, e := range ents {
		if len(e.Data) > 0 {
			data = append(data, e.Data...)
			e.Data = data[len(data)-len(e.Data) : len(data) : len(data)]
		}
	}
	s.m.Entries = ents
}

// liveness is the one message for each pair of nodes. It says that a node lives and that
// its disks make progress.
type liveness struct {
	boot      keyspace.BootID
	healthy   bool
	connected bool // the sender hears half of the others, and the node that leaders need
	sequence  uint64
	// heard are the nodes that the sender hears, in ascending order.
	heard []keyspace.NodeID
}

func encodeLiveness(l liveness) []byte {
	dst := []byte{frameVersion, frameLiveness}
	dst = binary.LittleEndian.AppendUint64(dst, uint64(l.boot))
	flags := byte(0)
	if l.healthy {
		flags |= livenessHealthy
	}
	if l.connected {
		flags |= livenessConnected
	}
	dst = append(dst, flags)
	dst = binary.AppendUvarint(dst, l.sequence)
	dst = binary.AppendUvarint(dst, uint64(len(l.heard)))
	for _, id := range l.heard {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(id))
	}
	return dst
}

func decodeLiveness(rest []byte) (liveness, error) {
	r := wire.NewReader(rest)
	l := liveness{boot: keyspace.BootID(r.Uint64LE())}
	flags := r.Flags(livenessHealthy | livenessConnected)
	l.healthy, l.connected = flags&livenessHealthy != 0, flags&livenessConnected != 0
	l.sequence = r.Uvarint()
	for n := r.Count(8); n > 0; n-- {
		l.heard = append(l.heard, keyspace.NodeID(r.Uint64LE()))
	}
	if err := r.End(); err != nil {
		return liveness{}, fmt.Errorf("%w: liveness of %d bytes: %w", errFrame, len(rest), err)
	}
	return l, nil
}
