package raftgroup

import (
	"fmt"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// outbox collects the messages of a pass's groups: one frame for each peer and class. It
// is owned by its worker's pass.
type outbox struct {
	w     *worker
	peers map[keyspace.NodeID]*peerOut
	dirty []*peerOut
	// entries says that the pass sends entries to somebody.
	entries bool
}

type peerOut struct {
	node  keyspace.NodeID
	dirty bool
	// entries says that the pass sends entries to it.
	entries bool
	frames  [2]openFrame
}

// openFrame is the unfinished frame of one method to one peer.
type openFrame struct {
	method   transport.Method
	frame    []byte
	messages int
	// last is the size of the previous frame, as an estimate for this one.
	last int
	// appends lists whose MsgApps are in the frame: raft is told if the bus rejects it.
	appends []appendRef
}

type appendRef struct {
	g  *Group
	to uint64
}

const (
	frameControl = iota
	frameRaft
)

func (o *outbox) init(w *worker) { o.w, o.peers = w, make(map[keyspace.NodeID]*peerOut) }

func (o *outbox) peer(node keyspace.NodeID) *peerOut {
	if node == 0 || node == o.w.h.cfg.Node {
		panic(fmt.Sprintf("raftgroup: frame from node %s to node %s", o.w.h.cfg.Node, node))
	}
	p := o.peers[node]
	if p == nil {
		p = &peerOut{node: node}
		p.frames[frameControl].method = transport.MethodRaftControl
		p.frames[frameRaft].method = transport.MethodRaft
		o.peers[node] = p
	}
	if !p.dirty {
		p.dirty = true
		o.dirty = append(o.dirty, p)
	}
	return p
}

// raft adds a raft message to the frame of its class, so that votes and heartbeats never
// wait behind data.
func (o *outbox) raft(g *Group, node keyspace.NodeID, m *pb.Message) {
	p := o.peer(node)
	l := &p.frames[frameControl]
	switch m.GetType() {
	case pb.MsgApp:
		l = &p.frames[frameRaft]
		l.appends = append(l.appends, appendRef{g, m.GetTo()})
		if len(m.GetEntries()) > 0 {
			o.entries, p.entries = true, true
		}
	case pb.MsgAppResp:
		l = &p.frames[frameRaft]
	default: // control
	}
	o.open(l)
	l.frame = appendRaftMessage(l.frame, g.id, m)
	o.added(p, l)
}

// host adds a message of the host's own kinds. Commit notices share the frame of the
// entries: they are as frequent, and nobody waits for them. So do sleep notices that follow them at once.
func (o *outbox) host(node keyspace.NodeID, m *message) {
	p := o.peer(node)
	l := &p.frames[frameControl]
	if m.kind == kindCommitNotice || m.behind {
		l = &p.frames[frameRaft]
	}
	o.open(l)
	l.frame = appendHostMessage(l.frame, m)
	o.added(p, l)
}

// sendsEntries says whether the pass has had entries for a node.
func (o *outbox) sendsEntries(node keyspace.NodeID) bool {
	p := o.peers[node]
	return p != nil && p.entries
}

func (o *outbox) open(l *openFrame) {
	if l.messages == 0 {
		l.frame = appendFrameHeader(make([]byte, 0, max(512, l.last+l.last/4)), o.w.h.cfg.ElectionTimeout)
	}
}

func (o *outbox) added(p *peerOut, l *openFrame) {
	if l.messages++; len(l.frame) >= frameBytesMax {
		o.send(p.node, l)
	}
}

// flush sends all open frames.
func (o *outbox) flush() {
	for i, p := range o.dirty {
		for j := range p.frames {
			if l := &p.frames[j]; l.messages > 0 {
				o.send(p.node, l)
			}
		}
		p.dirty, p.entries = false, false
		o.dirty[i] = nil
	}
	o.dirty, o.entries = o.dirty[:0], false
}

// send hands the frame to the bus. The order key is the worker: messages of one group
// stay in order, and those of two workers do not wait for each other. A liveness message
// that is due goes with a control frame. A frame that the bus rejects is lost, as in the network; raft is told, so that it probes instead of
// relying on it.
func (o *outbox) send(node keyspace.NodeID, l *openFrame) {
	if l.method == transport.MethodRaftControl {
		o.w.h.peers.tell(node, o.w.now, dueAlong)
	}
	o.w.h.m.frameBytes.Observe(float64(len(l.frame)))
	o.w.h.m.frameMessages.Observe(float64(l.messages))
	if err := o.w.h.cfg.Bus.Send(node, l.method, uint64(o.w.no), l.frame); err != nil {
		o.w.h.m.sendFailed.Inc()
		for _, a := range l.appends {
			if !a.g.closed {
				a.g.rn.ReportUnreachable(a.to)
			}
		}
	}
	clear(l.appends)
	l.last = len(l.frame)
	l.frame, l.messages, l.appends = nil, 0, l.appends[:0]
}
