// Package etcdapi is the API that etcd's clients use: the gRPC services of etcd v3 and its HTTP
// endpoints, on one port.
//
// # What it does
//
// It checks requests as far as that needs no data, fills in response headers, and words errors as
// etcd does (by kverror and rpctypes). It bounds requests in time and size. It serves HTTP and
// gRPC on one port, and never passes gRPC through net/http. It decides nothing about data: [KV],
// [Cluster] and [Node] do, which packages router and node implement and node wires.
//
// # Who checks what
//
// This package checks, on every node alike and before anything is routed:
//
//	empty keys, empty operations, sort options
//	a value or lease beside ignore_value or ignore_lease
//	the number of operations of a transaction and of its nested ones
//	keys that a transaction puts twice, or puts and deletes
//	the size of a change
//
// KV checks everything that needs data, time or a span:
//
//	compacted and future revisions, leases, ignore_value on a missing key
//	full disks and budgets
//	whether keys lie in one range
//
// # Who may do what
//
// Package auth has a rule for each method. An interceptor finds out who calls, and asks the rule. Some rules look
// at messages. The service does that, behind the checks above and those of size and alarms, as etcd does:
//
//	begin, permitted ── who sends it, by the newest view ──▶ the check ──▶ a permit in the context
//	                                                            │ no
//	                    once more by a view of now ◀── placement is asked: a right that was granted holds everywhere
//
// The permit is the access index of the view. Whoever asks the sequencer on behalf of the request passes it on, and
// gets AccessChanged where rights were taken from somebody since. Nothing has happened then; the request is checked
// anew once the gate knows that index ([Server] again). Two things ask no sequencer, and are
// checked once more. A serializable read is when its data are here. Watchers are by [Server.RightsTaken], before
// placement is told that this node knows of the change.
//
// A range's leader relies on the first list for the meaning of requests. It does not rely on it
// for memory safety, because requests also come by the bus.
//
// # Locks and elections
//
// [Locks] are etcd's own services on KV, Lease and Watch, called as functions. They exist if those
// three do. A stop ends their waiting calls before the services that these wait for.
//
// # JSON
//
// Paths under /v3/ are etcd's JSON gateway: its own generated translation, which calls the gRPC
// services over a connection within the process. Its streams may also come by websocket.
//
// # The console
//
// Paths under /console/ are package console's. It calls the services within the process ([Services]), in the name of who
// sent the HTTP request: what users may do there is what they may do by gRPC.
//
// # What is guaranteed
//
//  1. No request lasts beyond its bound. KV bounds its calls. [Options.RequestTimeout] bounds the
//     other unary calls and each message of a keepalive stream. TLS handshake and first bytes of a
//     connection have ten seconds.
//  2. A cancelled call gets Canceled, and a client's own deadline DeadlineExceeded. After the
//     server's bound it gets etcd's "request timed out".
//  3. A watcher's events follow the answer that creates it, in the order of package watch.
//  4. Missing services are not registered, so their calls get Unimplemented. Missing methods
//     of other services get Unimplemented with a text that names an alternative.
//  5. A method without a rule is refused, and so is a request whose sender was not looked for: package router
//     panics without a permit.
//
// # What if
//
//  1. A client demands a leader (metadata hasleader) and there is none: unary calls and new streams
//     fail at once with NoLeader. Running streams end after three election timeouts without one.
//  2. A client opens a connection and sends nothing: it is closed after ten seconds.
//  3. There are too many connections ([Options.MaxConnections]): further ones are refused, which
//     the log and a metric say. The metrics URLs have a bound of their own.
//  4. A client takes its watch events too slowly: its watchers go on from history, in bounded
//     memory, see package watch.
//  5. A client's certificate ends or is revoked: its connections are closed within a minute
//     ([Options.Verify]).
//  6. A client takes a large answer too slowly: it holds memory until it has the answer or is gone.
//     Reads of many keys that find none wait, within their deadlines. Nothing else waits.
//  7. The node stops: [Server.Stop] accepts nothing more and ends watch and keepalive streams with
//     etcd's "server stopped". It lets running calls end until its context is done, then cuts them
//     off.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	server.go       Server, Options: the port and all services on it
//	http.go         etcd's HTTP endpoints, and the port for metrics
//	console.go      what the console may call, and for whom
//	pipe.go         calls of KV for the pipe's streams
//	interceptor.go  what every gRPC call passes: bounds, leaders, measures
//	slow.go         where the time of slow calls went
//	tracing.go      traces for a collector
//	gateway.go      etcd's JSON gateway
//	socket.go       streams of the gateway by websocket
//	gatewaycall.go  one call of the gateway: its body and its answer
//	cluster.go      the service Cluster
//	maintenance.go  the service Maintenance
//	watch.go        the service Watch
//	watchers.go     who watches what, and how far behind, for operators
//	lease.go        the service Lease
//	locks.go        the services Lock and Election
//	auth.go         the service Auth
//	kv.go           the service KV
//	alarm.go        what alarms refuse
//	watchrights.go  watchers whose users may not have their events any more
//	leaserights.go  who may use a lease, by its keys
//	audit.go        what goes into the audit log
//	access.go       who sends a request, and whether that user may
//	loading.go  who may do what while the cluster is loaded
//	here.go         who may command a cluster that knows no users
//	check.go        checks of requests that need no data
//	codec.go        answers that are encoded once or in parts
//	listener.go     connections: TLS, HTTP or gRPC
//	http2.go        connections of HTTP/2: for HTTP or for gRPC
//	inside.go       connections within the process
//	errors.go       errors in etcd's words
//	metrics.go      metrics
//	version.go      the versions that clients are told
//	interfaces.go   what the services need of the node
package etcdapi
