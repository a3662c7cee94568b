// Package loadtest drives any etcd endpoint with puts, gets and transactions, measures it, and checks
// that acknowledged writes are there. This one tool measures etcd and Skein.
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
//     requests that were due in it (no coordinated omission). Requests still unsent a
//     timeout after the schedule's end count as never started.
//   - Throughput counts the requests that succeeded within the measured time.
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
// Of Skein the package uses only its clock; it observes servers from outside. Package
// cmd/loadtest is its command line; `skein demo --load` calls Run.
//
// # Files
//
//	run.go       the phases of a run
//	reads.go     many clients that read large answers, and a watcher beside them
//	idle.go      connections and watchers that rest, and the server's memory
//	verify.go    the keys at the end, against the ledger
//	client.go    the clients, closed and open loop
//	config.go    what a run is told
//	servers.go   processor time and versions of the servers
//	recorder.go  latencies of a phase
//	report.go    the report
//	machine.go   the machine on which a run took place
//	schedule.go  when the requests of an open loop are due
//	errors.go    errors by kind
//	ledger.go    what was acknowledged
//	value.go     values that name their writer
//	keys.go      keys
package loadtest
