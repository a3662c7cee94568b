// Package chaos breaks real skein processes while clients use them, and judges what
// the clients were told. All of it is in its tests; nobody imports it. There are two
// rigs.
//
// # Three processes on one network (TestChaos)
//
// The faults, on any node or several: kill -9; SIGSTOP for longer than lease and
// election timeout; a power cut; a disk that hangs; a disk that is full. For the last
// three each node's data lie on an ext4 of its own in a loop file. The power cut is
// EXT4_IOC_SHUTDOWN without a flush of the journal: data that no fsync had made
// durable are gone. kill -9 alone does not show that, because it leaves the page
// cache. The hanging disk is FIFREEZE: every writer waits.
//
// Clients write, read, compare and delete through clientv3, with values and keys that
// nobody writes twice. At the end the history of every key is read back revision by
// revision and compared with every answer:
//
//   - Nothing acknowledged is missing, nothing refused is there, nothing is there
//     twice.
//   - No two changes share a revision. Revisions follow real time over all clients.
//   - Every read is the state at its revision. Each key alone is linearizable
//     (porcupine).
//   - All nodes answer the same Range at the same revision, and the replicas of each
//     range have the same hash.
//
// Safety knows no tolerance. The time until the cluster serves, during a fault and
// after it, has a generous bound, and the measured times are printed.
//
// # Five processes, each in a network namespace (TestStorm)
//
// Each machine is a network namespace on a bridge, with a disk of its own. The clients
// use the bridge's own address and have all machines as endpoints, or one. Two to
// four faults happen at once: those above, and network faults. A partition acts in both
// directions or one. In a ring only neighbours reach each other. A machine is cut off
// from all others or from clients alone, or only one link is cut, in both directions or in one.
// There may also be a link that loses 30 of 100 packets, or a slow link.
//
// A byte of a table flips, while the node runs or before it starts. The replicas whose keys the
// table may hold are rebuilt. If it holds the node's own records, the node is replaced. A byte in the
// middle of the log flips. Then the node must refuse to start, and a new one replaces it. Only one of
// these two happens at a time, and it is mended before the next. In storms with an odd seed machines
// are paused, and their clocks with them. No lease is safe there, so their nodes run with
// --lease-reads=false.
//
// Meanwhile an operator changes the cluster with the skein command: splits, merges,
// moves, transfers, another replication factor, a sixth node that joins, drains and
// replacements. The report names the operations for which the build has no command;
// those are left out.
//
// Two of four seeds have users, and requests are checked. The clients above call in the name of one who may use every
// key, and the operator is root. Three other users have clients and watchers of their own, and an admin makes them,
// deletes them, and grants and revokes their rights all the time. Every second time tokens are JWTs. A new node is
// admitted by root then, because it has no certificate by which it could ask for itself.
//
// The simulator makes the requests and checks the results:
//
//   - A replay of the whole history in the order of revisions gives every answer.
//   - Single keys and the whole keyspace are linearizable (porcupine).
//   - Leases last as long as their holders were told, and no key outlives its lease.
//   - Watchers receive everything once and in order, over all faults. On no stream do
//     they receive progress below earlier progress, or an event at or below it.
//   - What needs a right is done only while the user may have it, and is not denied while the user surely has it. After
//     the acknowledgement of a revocation no node, cut off or not, answers a read of what was revoked, and no watcher
//     gets an event of a later revision. Where clocks pause only what has a revision is judged.
//
// All versions come from a watch from the first revision on; an error in it would
// contradict the answers. After healing every machine serves every range, and the
// operator's every command works. The map covers the keyspace exactly once. The
// replicas of each range are equal, and no node holds a replica that the map does not
// give it. No operation is left.
//
// # From the last release to this build and back (TestUpgrade)
//
// The storm's machines and clients, without faults and without the operator. All nodes
// run the last release at first. Before there is one, they run an earlier commit. One
// after the other gets this build, goes back, and gets it again. While both builds run, a
// raise of the cluster version is refused, and names the nodes of the older build. Once
// it is raised, the older build refuses the directories. The storm's checkers judge.
//
// # Where the machine stands still
//
// Both rigs watch how late their own short sleeps end. The standstills
// of the machine extend every bound of time. An event that is late only for them is
// printed as excused and counted. If the machine stood still for more than a
// quarter of a run, the run is not judged by time. It is skipped at its end with the
// reason; with SKEIN_NOTHING_LEFT_OUT=1 it fails. Client answers, unequal replicas
// and nodes that end by themselves have no excuse.
//
// # How to run it
//
//	make chaos SEED=7 DURATION=10m
//	make chaos-local SEED=7 DURATION=10m
//
// SKEIN_CHAOS_SEED and SKEIN_CHAOS_DURATION are the same for go test; without a
// duration each fault happens once. The seed fixes schedule and workload, not the
// threads of the processes. A failed run keeps history and logs where go test
// -artifacts says. A storm also keeps the messages to watchers (told.txt.gz, for
// zcat). Without -artifacts a failed storm names the directory where it keeps them.
//
// Loop files, mounts and namespaces need root, mkfs.ext4, fsfreeze, ip, tc and nft. If
// one is missing, the test prints that and runs the rest. With
// SKEIN_NOTHING_LEFT_OUT=1, which CI sets, it fails instead.
//
// Nothing stays behind, however a run ends, and two runs share nothing. The tests have
// their own mount and network namespaces. The machines' namespaces have no names and
// end with their last user. Loop devices clear themselves, nodes die with their
// parent, and a frozen disk thaws when the process that froze it ends.
package chaos
