// Package pipeapi serves pipes: streams that carry many operations of etcd's KV service each, see pipe.proto and
// docs/PIPE.md. It decides nothing about keys or users. [Operations] serve each operation as the call of KV that it
// is, and package etcdapi has them.
//
// # How it works
//
//	reader ── a frame ──▶ within the window? ──▶ begun here ──▶ whoever brings the answer of the range
//	                             │ no                 │ no                   │
//	                             ▼                    ▼                      ▼
//	                      the stream ends          workers ──▶ answers ──▶ writer: all that there are, in one frame
//
// A frame comes as its bytes. What is in it is counted before it is decoded, because two bytes can be a message of a hundred bytes.
//
// A change of keys that this node leads, without values in its answer, is begun by the reader ([Operations].Begin). It has no
// goroutine: whoever applies it encodes its answer and hands that to the writer. Every other operation has a worker, which
// waits (Operations.Do). Those are reads, operations on keys that other nodes lead, and what waits for a right or for room.
// A change that was begun gets a worker too where waiting is left to do: it has failed, and may be tried again; it is
// cancelled; or it has lasted for a while, and somebody must look at its deadline.
//
// The writer takes what has come while it was sending, so frames grow with the load and nothing waits for a timer.
// Workers are kept for the next operations, with the stacks that these have grown.
//
// # What is guaranteed
//
//  1. Each operation that was begun is answered once, unless the stream ends before.
//  2. An operation leaves the window before its answer is sent. So a client that counts answers is never told that it
//     has ignored the window.
//  3. A pipe holds at most its window of requests, a window's bytes of answers, and a frame under way. While so many bytes
//     wait for the client, it reads no further frame and begins no operation. Sizes are not known before answers are there: one that
//     finds no room is dropped and made again later, unless its operation has changed something. So beside the
//     window there are the answers that workers have in their hands at the moment, and those of 16 changes (room.go). Answers of spans
//     hold their bytes of the node's budget. An operation has few messages within it, or holds room for them of
//     [Options.PartBytes] until it is answered. It stays encoded until there is room, and its worker waits for that. Windows, with few
//     messages in each operation, have no bound over all pipes: a node may hold one for each of [Options.MaxPipes].
//  4. A place tells a client no more of a range than what its user may read. (etcdapi)
//  5. Who brings an answer waits for nothing here: neither for the client nor for the log.
//  6. A client that breaks the protocol loses its stream. What was begun by it may happen.
//
// # What if
//
//  1. The client does not take its answers: nothing more is read from it, or begun. It holds what it holds until it is gone.
//  2. A client opens pipe after pipe: above [Options.MaxPipesOfConnection] those of its connection are refused. Those of its
//     address are refused once they are as many as are left of [Options.MaxPipes], so others find room.
//  3. A client sends more large transactions than there is room for: they wait in the order in which they came, and those of one pipe have half of
//     the room. What has room ends within twice [Options.PartWait], so room comes back also from a client that takes nothing.
//  4. The node stops: clients are told, and go on at another node. What has come within [Options.Grace] is answered.
package pipeapi
