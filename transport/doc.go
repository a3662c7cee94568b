// Package transport is the bus between nodes: messages with opaque payloads,
// keyed by a method number, over QUIC with TLS 1.3 on both sides.
//
// It offers three forms. Send is one way. Call has one answer, a deadline and a
// cancellation that cross the bus. A Stream carries messages both ways under a
// byte credit, so that a slow reader costs its writer and nobody else.
//
// # What it guarantees
//
//   - Messages of one (peer, class, order key) arrive in the order in which they
//     were sent, or not at all, and never twice; also across a reconnection.
//   - Classes do not wait for each other. Liveness and votes pass while raft data,
//     requests or snapshots are stuck behind a slow receiver.
//   - Send never blocks and no queue is without bound: a full one answers
//     ErrQueueFull at once, an unreachable peer ErrNoRoute.
//   - A failed Call says whether the handler certainly never ran (NotDelivered)
//     or whether its fate is unknown.
//   - A peer counts as up only after the answer to a Hello that names its
//     cluster, node and boot. What a certificate says about them must agree.
//   - No decoder allocates what a peer only claims to send.
//
// # What it does not do
//
// It repeats nothing: what a broken connection has lost is lost, and its users
// (raft, the router, the feeds) repeat what may be repeated. It does not know
// what a payload means, who leads what, or who is a member: node tells it the
// peers. It does not forward.
//
// # How it is built
//
// An Endpoint is the bus without a network: handlers, queues, calls, streams,
// peers. A carrier gives it Sessions and moves their bytes: QUIC is the carrier of
// real clusters, package sim/simbus that of simulated ones, so that a simulation
// runs all of this package's code but the sockets. Each Session has one queue
// (a Lane) per class and order slot; a lane's writer takes everything that has
// gathered and writes it at once, which is what makes QUIC affordable.
//
// raftgroup, shard, placement and node send and handle messages; node alone makes
// endpoints.
package transport
