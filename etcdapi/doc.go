// Package etcdapi is the face that etcd's clients see: the gRPC services of etcd v3
// and its HTTP endpoints, on one port.
//
// # What it does
//
// It checks requests by their look alone, fills in the fields of response headers
// that every response has, words errors as etcd does (the words are kverror's and
// rpctypes'), bounds requests in time and size, and serves HTTP and gRPC on one port
// without ever passing gRPC through net/http. It decides nothing about data: that is
// behind [KV], [Cluster] and [Node], which packages router and node implement and
// node wires.
//
// # Who checks what
//
// Here, before anything is routed, and on every node alike: empty keys, sort options,
// a value or lease given beside ignore_value or ignore_lease, the number of operations
// of a transaction and what nested ones have left, keys that a transaction puts twice
// or puts and deletes, empty operations, and the size of what changes something.
// Behind KV: whatever needs data, time or a span: revisions that are compacted or in
// the future, leases, ignore_value on a missing key, full disks and budgets, and
// whether keys lie in one range. A range leader may rely on what is checked here for
// requests that came through a gateway; it does so for their meaning, not for its
// memory safety, since the bus is a door of its own.
//
// # Locks and elections
//
// [Locks] are etcd's own services over KV, Lease and Watch, called as functions. They are
// there where those three are. A stop ends what waits before it ends what it waits on.
//
// # JSON
//
// Under /v3/ is etcd's JSON gateway: its own generated translation, which calls the
// gRPC services over a connection within the process. Its streams may come by websocket too.
//
// # Guarantees
//
// No request outlives its bound: KV's own for its calls, [Options.RequestTimeout] for
// the other unary ones and for each message of a keepalive stream. No connection is held without one: TLS handshake and first bytes have ten seconds. A
// cancelled call stays Canceled, the client's own deadline DeadlineExceeded; where the
// server lost patience it is etcd's "request timed out". What a watcher is told comes
// behind the answer that it was created, in the order of package watch. Services that are not there
// yet (Auth) are not registered, so that their calls
// answer Unimplemented; methods that are missing from a service that is there answer
// Unimplemented with a text that says so.
//
// # What if …
//
//   - a client demands a leader (metadata hasleader) and there is none: unary calls
//     and new streams fail at once with NoLeader; streams that stand are ended after
//     three election timeouts without one.
//   - a client opens a connection and says nothing: it is closed after ten seconds.
//   - there are too many connections: the listener stops accepting until one closes.
//   - a client takes its watch events too slowly: its watchers go on from history, in
//     bounded memory, see package watch.
//   - the node stops: [Server.Stop] accepts nothing more, ends watch and keepalive streams with etcd's
//     "server stopped", lets running calls end until its context is done, then cuts them
//     off.
package etcdapi
