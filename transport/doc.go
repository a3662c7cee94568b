// Package transport is the bus between nodes: messages with opaque payloads,
// keyed by a method number, over QUIC with TLS 1.3 on both sides.
//
// It offers three forms. Send is one way. Call has one answer; its deadline and
// its cancellation cross the bus. A Stream carries messages both ways under a
// byte credit, so a slow reader delays only its own writer.
//
// # What it guarantees
//
//   - Messages of one (peer, class, order key) arrive in the order in which they
//     were sent, or not at all. None arrives twice, also across a reconnection.
//   - Classes do not wait for each other. Liveness and votes pass while raft data,
//     requests or snapshots are stuck behind a slow receiver.
//   - Send never blocks, and the queues of all peers are bounded together. A full queue
//     answers ErrQueueFull at once, an unreachable peer ErrNoRoute. A peer that is blocked
//     leaves the others room.
//   - A failed Call says whether the handler certainly never ran (NotDelivered)
//     or whether its fate is unknown.
//   - A peer counts as up only after it has answered a Hello that names its
//     cluster, node and boot. Its certificate must agree.
//   - No decoder allocates memory for bytes that a peer only announces.
//
// # What it does not do
//
// It repeats nothing. A broken connection loses messages, and the users (raft, the
// router, the feeds) repeat what may be repeated. It does not know what a payload
// means, who leads a range or who is a member: node tells it the peers. A relay
// never passes on to another relay.
//
// # How it works
//
//	Send, Call, OpenStream                         handlers
//	        │ route: the peer's session                ▲ Send: the reading goroutine
//	        ▼                                          │ Call, Stream: one goroutine each
//	 Lane: one queue per class and slot          Session.receive
//	        │ one batch: all that has gathered         ▲ frame by frame, in order
//	        ▼                                          │
//	 writeLane ──▶ carrier: QUIC; TCP for bulk ──▶ readLane
//
// An Endpoint is the bus without a network: handlers, queues, calls, streams and
// peers. A carrier gives it Sessions and moves their bytes. QUIC is the carrier of
// real clusters and package sim/simbus that of simulated ones. So a simulation
// runs all code of this package but the sockets.
//
// Each Session has one queue, a Lane, for each class and order slot. A lane's
// writer takes everything that has gathered and writes it at once, which makes
// QUIC affordable. A frame that comes alone is written to a QUIC stream by who sends it.
// Bulk sessions run over TCP, because it moves the many bytes of copies with six tenths of QUIC's CPU.
//
// raftgroup, shard, placement and node send and handle messages. node alone makes
// endpoints.
//
// # States of a session
//
// Both nodes may dial. Main and bulk sessions are made alike, each by its own
// dialler; the bulk session ends with the main one.
//
//	        dialler                                    accepter
//	no session ──dial, Hello──▶ helloSent      no session ──Hello read──▶ judge
//	   ▲                           │ answer        ▲                       │ answer: welcome
//	   │ refused, timeout,         ▼               │ refused               ▼
//	   │ the peer's Hello came  confirm ──────────────────────────────▶ accepting
//	   │                           │ Attach                                │ Attach
//	   └────── session ends ──── up ◀───────── bytes both ways ─────────▶ up
//
// Of two crossing Hellos the one from the node with the lower id wins: that node
// refuses the other Hello. A confirmed connection replaces an older session.
//
// # What if
//
//   - a connection breaks: calls whose frame was never handed to the carrier fail
//     as NotDelivered, all others with unknown fate. Streams end with
//     ErrUnreachable. The dialler tries again within about 70 ms, and waits longer each time while sessions last less
//     than a second.
//   - the link with a peer is broken: calls and streams of ClassRequest go by way of
//     a node that hears the peer (Config.Relays). Raft and copies do not. When the
//     session stands again, such streams end with ErrUnreachable.
//   - a peer restarts: its first answer is a stateless reset, which ends the old
//     session at once, and the dialler tries again without delay. PeerState.Boot
//     changes.
//   - a peer hangs without closing: MaxMissedPings unanswered pings end the session. Over TCP they go by the connection of
//     ClassControl; a connection of another lane that is lost alone ends the session after three idle timeouts
//     (TCP_USER_TIMEOUT and keep-alives).
//   - this process was stopped for a while: pings are counted and not timed, so
//     the peer is not blamed for the pause.
//   - a peer reads too slowly: its class's queue fills and Send answers
//     ErrQueueFull. Small frames that must not be lost have room behind the full
//     queue. When that is used up too, the session ends.
//   - a handler is slow: it holds one place of MaxHandlers of its method, and the bytes of
//     its call; other methods and classes, and other peers, go on.
//   - UDP passes and TCP does not: the main session stands, copies fail, and the
//     log says so after 12 attempts.
//   - a certificate or cluster id is wrong: the Hello is refused with a reason,
//     both logs name it, and the dialler waits 5 s between attempts.
//   - a peer's certificate ends or is revoked, or the authority is exchanged: its sessions
//     end within a minute, and new ones are refused.
//   - a peer is down: it is dialled again after up to two seconds, and gets a knock each 100 ms until it is back. Over TCP it
//     is dialled again after up to half a second.
//   - a node asks that has no identity yet: it gets what Config.Tell returns, and
//     no session (see Ask).
//
// # Invariants
//
//  1. A message of an old session is never handled after one of a newer session
//     with the same peer and class. [BeginRead waits for the old readers.]
//  2. A call gets exactly one result. [Session.calls holds it until then.]
//  3. NotDelivered is only said of a frame that lay behind the bytes handed to the
//     carrier. [Lane.close, Session.End]
//  4. A stream's receiver never holds more than its window and one message. [onData
//     and onGrant end the session of a peer that breaks this.]
//  5. Bytes released to a budget were taken from it. [Batch.Done]
//  6. No goroutine outlives Wait. [Endpoint.Go]
//
// # Locks
//
// QUIC.mu is taken before Endpoint.mu, Endpoint.life and link.mu. peer.attach is
// taken before Endpoint.mu, Endpoint.life, Session.mu, Lane.mu and link.mu, because
// Attach ends the session that it replaces. Lane.mu is taken before budget.mu, loopQueue.mu
// too, and stream.mu before detours.mu. All other locks are leaves. None is held over a
// handler, a listener or the network.
//
// # Files
//
// From the top down; calls go downwards (internal/archtest holds it):
//
//	quic.go            QUIC: the bus of real clusters; start, stop, peers
//	accept.go          connections of diallers, and the answers to their Hellos
//	dial.go            when and where to dial, and the dialler's Hello
//	knock.go           datagrams to peers without a session
//	link.go            what stands between this node and one peer
//	attach.go          a connection becomes the peer's session
//	ask.go             questions of nodes without identity
//	tcp_lanes.go       a main session's lanes as TCP connections
//	bulk.go            TCP connections, for bulk sessions
//	quic_lanes.go      a session's lanes as QUIC streams
//	receive.go         dispatch of received frames
//	session_stream.go  streams over a session: open, serve, receive
//	ping.go            probes of a session
//	call.go            calls over a session: ask, serve, answer
//	send.go            one-way messages, and the session that a message takes
//	wire.go            connections of both carriers behind one interface
//	endpoint.go        Endpoint: configuration, handlers, peers, lifetime
//	loopback.go        messages of a node to itself
//	result.go          how a call or stream ended
//	detour.go          streams that go around a broken link
//	session.go         one connection with a peer: state, end, choice of lanes
//	socket.go          UDP and TCP sockets, and the choice of one for a target
//	security.go        TLS configurations and identities
//	hello.go           the frames before a session stands
//	methods.go         the numbers, names and classes of methods
//	lane.go            the outgoing queue of one class and slot
//	pool.go            the memory that all queues share, and all handlers
//	metrics.go         metrics
//	stream.go          one end of a stream: credit, order, end
//	frame.go           the frames of a session
//	memory.go          pooled memory for frames
//	coalesce.go        UDP reads that the kernel has joined
//	bus.go             the words of the bus: classes, handlers, errors
package transport
