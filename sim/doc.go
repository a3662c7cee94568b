// Package sim runs whole clusters in one process and in virtual time, breaks them,
// and judges what their clients saw.
//
// A run is made from a seed. Real nodes (package node's Cores: wal, engine, raft
// groups, placement, ranges, router) run on the simulated bus of simbus and on the
// differing, drifting clocks of simclock. Their fsyncs take time, and a crash drops
// what their memory disks had not synced. Clients put, delete, read and run
// transactions through the gateways of all nodes while faults are injected. Then
// everything is healed and must serve again within a bound. At the end all nodes
// stop in order, and the disks are read.
//
// The seed fixes the workload, the faults, what the disks lose and raft's
// randomness. It does not fix the schedule of goroutines: a failing seed fails
// often, not always. Repeat it to find the cause.
//
// # What is checked
//
//   - Single keys are linearizable (porcupine), by the values in the answers alone.
//     Whole answers are linearizable against a model of all keys, one window of
//     revisions at a time.
//   - A replay of all writes on the disks, in the order of revisions, reproduces
//     every answer that has a revision. It contains nothing that nobody asked for
//     and nothing twice.
//   - A lease lasts its TTL after the call of the last acknowledged keepalive, by
//     the fastest clock. All its keys end at one revision, by itself or by a revoke.
//     Afterwards nothing is attached to it, and it is neither renewed nor read. When
//     no lease is left, no key of one is left.
//   - No two changes share a revision. A change has a greater revision than
//     everything that returned before it began.
//   - Without failures every revision is used.
//   - Watchers move from node to node over all faults. They receive every version of
//     their spans once, in the order of revisions, no revision divided, and no
//     progress ahead of an event. When all is quiet they have everything.
//   - On one stream nobody receives progress below the place of any of its watchers,
//     or an event at or below that progress.
//   - Reads that begin after a compaction do not see compacted versions. Nothing
//     else is refused as compacted.
//   - All replicas have the same hash at the same applied index, and the same
//     versions on their disks after the stop.
//   - The range map covers the keyspace exactly once at all times. At the end it
//     agrees with the replicas, and no operation is left.
//   - No node holds a replica that the map does not give it, 30 s after healing or
//     after the last repair.
//   - With zones, replicas in different zones stay so, and at the end all are.
//   - A node that has lost its disk is not admitted under its old id, also while
//     another node joins. No two disks belong to one node.
//   - Each selection that was read of a cut is that of the history at exactly the cut's revision, with all of create,
//     mod, version and lease. A cut has every lease that was there while it was made. The keys at an earlier cut and
//     all versions since are the keys at a later one. After healing a hold keeps what it promises.
//   - A loaded cluster has what its source had, and nothing else. Reads meanwhile are those of the source at the
//     position. Its first write has the revision behind the source's, unless a fault came between. A load that
//     lacks something does not finish.
//   - Users whose rights change: no change of theirs gets a revision after the
//     acknowledgement of what takes its right. After it no serializable read is answered
//     and no watcher told by that right, also at a node that is cut off. Nobody is denied
//     what was granted before the request began.
//   - After healing every node that was to join serves, and every node that was to
//     leave has left.
//   - After healing every operation succeeds, at every gateway and range.
//   - The run itself: at least 80 % of the operations have a definite answer, and
//     every promised fault has happened.
//
// Before each compaction everything is read at the present revision, and then the
// stores are read. Versions that a compaction may have removed come from there, all
// others from the disks.
//
// The result of many runs counts how often each fault happened, and how often each pair of faults met.
//
// The build tag planted adds mutations to the nodes (internal/mutation). The checkers
// know none of them. make planted shows that they find each within a few seeds of
// its story, and that the same seeds are clean without it.
//
// Users work through etcd's services of package etcdapi. A run with users serves these
// on each node, within the process. So tokens, checks and permits are those of a real
// node. All other clients stand behind these services.
//
// Nodes that are no founders join through join.Joiner, by --join or by etcd's
// MemberAdd. That is the code of a real node between its configuration and Open.
// They lose their power or their disks in any step of it. They leave by an
// operator's commands or by etcd's MemberRemove, and others take their names and
// peer URLs.
//
// The simulation does not cover full disks, and it never grants the id of a lease
// twice.
//
// # Running it
//
// make sim SEEDS=n runs the seeds below n of every story, each in a process of its
// own, and ends with a table of operations, faults and verdicts. SKEIN_SIM_FROM=k
// begins with seed k, and SKEIN_SIM_STORIES=pairs,five runs these alone. The story pairs
// has each kind of fault beside each other kind within as many seeds as there are kinds;
// a line says which have met. SKEIN_SIM_SEED=s
// runs one seed of all stories, SKEIN_SIM_REPEAT=k times (go test -run
// TestStories/five). SKEIN_SIM_DEBUG=1 writes the nodes' whole log into the trace. A
// run that fails keeps trace.txt and history.txt in a directory that it names;
// SKEIN_SIM_KEEP=1 keeps them for every run.
//
// A run under the race detector takes ten times as long. The default tests have one
// seed of each short story, make sim a tenth of its seeds.
//
// Package judge, below this one, has the checkers.
package sim
