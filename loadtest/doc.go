// Package loadtest drives any etcd endpoint with puts, gets, transactions, pages and leases, or as the API servers of a Kubernetes
// cluster do, measures it, and checks that acknowledged writes are there. This one tool measures etcd and Skein.
//
// A run has up to four phases: fill (each key is written once, so that gets find
// something), warm-up (not measured), the measured phase, and verification. Keys are
// spread evenly over printable ASCII. So a store that splits its keyspace sees them in
// all ranges.
//
// # What is measured
//
//   - Closed loop (no rate): each client sends its next request after the answer to the
//     last one. Latency counts from the send. A slow server gets fewer requests, so the
//     percentiles say little about what users would see at a given load.
//   - Open loop (a rate): request n is due at start + n/rate whatever the server does.
//     Latency counts from the moment it was due. So a stall of one second shows in all
//     requests that were due in it (no coordinated omission). The run ends in time:
//     requests still unsent then are counted as failed.
//   - Throughput counts the requests that succeeded within the measured time.
//   - Objectives (Config.SLO) are judged from the histograms of the measured phase.
//   - CPU per operation of the servers comes from their process_cpu_seconds_total, that
//     of the load generator from getrusage, both over the measured phase alone.
//
// # What is verified
//
// Each value names the run and the operation that wrote it. For each key the ledger
// knows the acknowledged put with the highest revision and the puts of unknown fate. At
// the end a key must hold the former, at exactly its revision, or one of the latter at
// a higher one. During the run revisions may not go back in real time. A linearizable
// get may not return less than was acknowledged to anyone before it was sent.
//
// In workload Kubernetes each object has one writer, which compares its mod_revision: a
// transaction that finds another one than was last answered is a broken promise. Each watcher must get
// each acknowledged change exactly once, in the order of revisions.
//
// # What is said of the generator
//
// A report has how much of its processors the generator used, how busy its machine was, and
// how late it woke. It warns where these are too high: the figures are then not those of the
// servers alone. It also has all histograms, so that package results can merge reports.
//
// Requests go through the interface kv, which dial fills: by etcd's calls, or by the pipe of package client. By the pipe too
// each client has a goroutine, which waits for its own answer alone. One that waited for several would see some of them late,
// and their latencies would be too long.
//
// Of Skein the package uses only its clock and its client; it observes servers from outside. Package
// cmd/loadtest is its command line; `skein demo --load` calls Run.
//
// # Files
//
//	sweep.go      runs of a load that grows
//	run.go        the phases of a run
//	reads.go      many clients that read large answers, and a watcher beside them
//	idle.go       connections and watchers that rest, and the server's memory
//	cleanup.go    deletes a run's keys
//	client.go     the clients, closed and open loop
//	churn.go      leases that come and go
//	keywatch.go   watchers of a run's keys
//	kubernetes.go the clients of workload kubernetes, and what must be there at its end
//	kubewatch.go  its watchers
//	verify.go     the keys at the end, against the ledger
//	config.go     what a run is told
//	slo.go        what a run must reach
//	servers.go    processor time and versions of the servers
//	pipe.go       requests by the pipe
//	access.go     connections to endpoints, and why there is none
//	report.go     the report
//	saturation.go whether the load generator is the bottleneck
//	kinds.go      the kinds of operations
//	kubeconfig.go what workload kubernetes is told: kinds of operations and objects
//	histogram.go  latencies as a report has them
//	recorder.go   latencies of a phase
//	machine.go    the machine on which a run took place
//	schedule.go   when the requests of an open loop are due
//	errors.go     errors by kind
//	ledger.go     what was acknowledged
//	revisions.go  sets of revisions
//	value.go      values that name their writer
//	keys.go       keys
//	zipf.go       ranks of frequent keys
package loadtest
