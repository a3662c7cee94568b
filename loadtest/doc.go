// Package loadtest drives any etcd endpoint with puts and gets, measures it, and
// checks that what was acknowledged is there. etcd and Skein are measured by this
// one tool.
//
// A run has up to four phases: fill (each key is written once, so that gets find
// something), warm-up (not measured), the measured phase, and verification. Keys
// are spread evenly over printable ASCII, so that a store which splits its keyspace
// sees them in all ranges.
//
// # What is measured
//
//   - Closed loop (no rate): each client sends its next request when the last one
//     was answered. Latency is from the send. A slow server is asked less, so the
//     percentiles say little about what users would see at a given load.
//   - Open loop (a rate): request n is due at start + n/rate whatever the server
//     does. Latency is from the moment it was due, so a stall of one second is
//     seen by all requests that were due in it (no coordinated omission). What is
//     still due a timeout after the schedule's end is counted as never started.
//   - Throughput counts what was answered well within the measured time.
//   - CPU per operation of the servers comes from their process_cpu_seconds_total,
//     that of the load generator from getrusage, both over the measured phase alone.
//
// # What is verified
//
// Each value bears the run and the number of the operation that wrote it. Of each
// key the ledger knows the acknowledged put with the highest revision and the puts
// whose fate is unknown. At the end a key must hold the former, at that very
// revision, or one of the latter at a higher one. On the way, revisions may not go
// back in real time, and a linearizable get may not answer with less than what was
// acknowledged to anyone before it was sent.
//
// The package knows nothing of Skein but its clock: what it says of a server it has
// from outside. Package cmd/loadtest is its command line; `skein demo --load` calls
// Run.
package loadtest
