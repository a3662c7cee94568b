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
//   - A lease lasts its TTL after the call of the last keepalive that was acknowledged, in
//     the time of the world, reckoned on the fastest clock. All its keys go at one revision
//     that nobody asked for, or at one that a revoke vouches for; nothing is attached, renewed
//     or read of it afterwards, and when no lease is left no key of one is.
//   - Revisions: none belongs to two changes, and what returned before another
//     began has not a greater one.
//   - Without failures every revision is used.
//   - Watchers, which go from node to node over all faults, were told every version of
//     their spans once and in the order of revisions, none divided, and no progress
//     ahead of one; when all is quiet they have everything. On one stream nobody is told
//     progress below what any of its watchers was told, nor an event at or below it.
//   - What was compacted is read by nobody who asks later, and nothing else is refused
//     as compacted.
//   - All replicas have the same hash at the same applied index, and the same
//     versions on their disks after the stop.
//   - The range map covers the keyspace exactly once, whenever one looks, and at the end
//     says what the replicas say. No operation is left then, and 30 s after healing, or where
//     repairs take longer when they are done, no node holds a replica that the map does not
//     give it.
//   - Where machines stand in zones, replicas that are in different ones stay so, and all are in
//     the end.
//   - A node that has lost its disk is not let in with its old id, also not while another one
//     joins, and no two disks are one node's. Once all is healed who was
//     to join serves, and who was to leave has left.
//   - After healing every operation succeeds, at every gateway and range.
//   - The run itself: at least 80 % of the operations have a definite answer, and
//     every fault that was promised has happened.
//
// Before each compaction everything is read at the present revision, and then the
// stores: what a compaction may have taken away is taken from there, all else from
// the disks.
//
// Bugs can be planted into the nodes (internal/mutation, with the build tag planted).
// make planted shows that the checkers, none of which knows of them, find each within
// a few seeds of its story, and that the same seeds are clean without it.
//
// Nodes that are no founders come in by join.Joiner, which is the code of a real node between
// its configuration and Open: by --join or as etcd's MemberAdd has it. They lose their power,
// or their disks, in any step of that, leave by an operator's commands or etcd's
// MemberRemove, and others come under their names and peer URLs.
//
// What it does not do: full disks are not in the workload, and no id of a lease is granted twice.
//
// # Running it
//
// make sim SEEDS=n runs the seeds below n of every story, each in a process of its
// own, and ends with a table of operations, faults and verdicts. SKEIN_SIM_SEED=s runs
// one seed of all stories, SKEIN_SIM_REPEAT=k times (go test -run TestStories/five);
// SKEIN_SIM_DEBUG=1 has the nodes' whole log in the trace. A run that fails keeps
// trace.txt and history.txt in a directory that it names, with SKEIN_SIM_KEEP=1 every run.
//
// A run under the race detector takes ten times as long: the default tests have one of
// each short story, make sim a tenth of its seeds.
//
// The checkers know nothing of Skein's inside: history.go, model.go and the check
// files deal in etcd's messages alone. Each of them is shown to reject a history
// that is wrong in its own way.
package sim
