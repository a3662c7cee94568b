// Package sim runs whole clusters in one process and in virtual time, breaks them,
// and judges what their clients saw.
//
// A run is made from a seed. Real nodes (package node's Cores: wal, engine, raft
// groups, placement, ranges, router) stand on the simulated bus of simbus, on
// clocks of simclock that differ and drift, and on memory disks whose fsyncs take
// time and which forget after a crash what was not synced. Clients put, delete,
// read and run transactions through the gateways of all nodes while faults are
// injected; then everything is healed, must serve again within a bound, is stopped
// in order, and the disks are read.
//
// The seed fixes the workload, the faults, what the disks lose and raft's
// randomness. It does not fix the schedule of goroutines: a failing seed fails
// often, not always, and is repeated to be hunted.
//
// # What is checked
//
//   - Single keys are linearizable (porcupine), by what the answers say of values
//     alone; whole answers, windows of revisions at a time, against a model of all
//     keys.
//   - The history of all writes, as the disks have it at the end, replayed in the
//     order of revisions, reproduces every answer that has a revision, and contains
//     nothing that nobody asked for and nothing twice.
//   - Revisions: none belongs to two changes, and what returned before another
//     began has not a greater one.
//   - Without failures every revision is used.
//   - All replicas have the same hash at the same applied index, and the same
//     versions on their disks after the stop.
//   - The range map covers the keyspace exactly once and says what the replicas say.
//   - After healing every operation succeeds, at every gateway and range.
//   - The run itself: at least 80 % of the operations have a definite answer, and
//     every fault that was promised has happened.
//
// Plants (planted_test.go, with the build tag planted) put something wrong between
// healthy nodes and their machines: requests that run twice, a wal whose syncs do
// nothing, a lease that does not end. The checkers find each within a fixed set of
// seeds and pass the same seeds without it.
//
// What it does not do: requests over several ranges that write, compaction, leases,
// watches, snapshots of replicas that were cut off, and full disks are not in the
// workload.
//
// # Running it
//
// SKEIN_SIM_SEEDS=n runs the seeds below n of every story (make sim does), and
// SKEIN_SIM_SEED=s one, SKEIN_SIM_REPEAT=k times; SKEIN_SIM_DEBUG=1 has the nodes'
// whole log in the trace. A run that fails keeps trace.txt and history.txt in a
// directory that it names.
//
// The checkers know nothing of Skein's inside: history.go, model.go and the check
// files deal in etcd's messages alone. Each of them is shown to reject a history
// that is wrong in its own way.
package sim
