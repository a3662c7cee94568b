// Package chaos breaks real skein processes while clients use them, and judges what the
// clients were told. All of it is in its tests; nobody imports it. There are two rigs.
//
// # Three processes on one network (TestChaos)
//
// Any node, or several: kill -9; SIGSTOP for longer than lease and election timeout;
// a power cut; a disk that hangs; a disk that is full. For the last three each node's
// data lies on an ext4 of its own in a loop file. EXT4_IOC_SHUTDOWN without a flush of
// the journal is the power cut: what no fsync had made durable is gone, which kill -9
// alone does not show, for it leaves the page cache. FIFREEZE is the disk that hangs:
// whoever writes waits.
//
// Clients write, read, compare and delete through clientv3, each of them with values
// and keys that nobody writes twice. At the end the history of every key is read back
// revision by revision and compared with every answer: nothing acknowledged is
// missing, nothing refused is there, nothing is there twice; no two changes share a
// revision; revisions follow real time over all clients; every read is the state at
// its revision; each key by itself is linearizable (porcupine). Then all nodes answer
// the same Range at the same revision, and the replicas of each range count the same
// hash. Safety knows no tolerance. How soon the cluster serves, during a fault and
// after it, has a generous bound, and the measured times are printed.
//
// # Five processes, each in a network namespace (TestStorm)
//
// Each machine is a network namespace on a bridge, with a disk of its own; the clients are
// on the bridge's own address and have all machines as endpoints, or one. Two to four
// troubles happen at once: those above, and between the machines partitions both ways, of
// which one side is deaf or mute, a ring in which neighbours alone hear each other, a
// machine cut off from all or from clients alone, a link that loses 30 of 100 packets, a
// slow one. Meanwhile an operator changes the cluster with the skein command: splits,
// merges, moves, transfers, another replication factor, a sixth node that joins, drains and
// replaces; what the build has no command for is left out, and the report says so.
//
// The clients' requests are the simulator's, and so are the checkers: the whole history
// replayed in the order of revisions gives every answer, keys and the whole keyspace are
// linearizable (porcupine), leases last as long as their holders were told and no key
// outlives them, watchers were told everything once and in order, over all faults, and on no stream progress
// below what it had told before, nor an event at or below it. All
// versions that there are come from a watch from the first revision on: whatever is wrong
// with it does not agree with the answers. When all is healed every machine serves every
// range, the operator's every command works, the map covers the keyspace exactly once, the
// replicas of each range are equal, no node holds a replica that the map does not give it,
// and no operation is left.
//
// # Where the machine stands still
//
// Both rigs look how late their own short sleeps end. For how long the machine stood still
// is taken out of every bound of time, and each thing that is late for that alone is printed
// as excused, and counted. A run of which that was more than a quarter is not judged by time:
// it is skipped at its end, and says why, or fails with SKEIN_NOTHING_LEFT_OUT=1. What clients
// were told, equal replicas and nodes that end by themselves know no excuse.
//
// # How to run it
//
//	make chaos SEED=7 DURATION=10m
//	make chaos-local SEED=7 DURATION=10m
//
// SKEIN_CHAOS_SEED and SKEIN_CHAOS_DURATION are the same for go test; without a
// duration each fault happens once. The seed fixes schedule and workload, not the
// threads of some processes. A failed run keeps history and logs where go test -artifacts
// says, a storm also what watchers were told, message by message (told.txt.gz, for zcat); without that a
// failed storm names the directory where it keeps them.
//
// Loop files, mounts and namespaces take root, mkfs.ext4, fsfreeze, ip, tc and nft. What
// is missing is printed, and the rest runs; with SKEIN_NOTHING_LEFT_OUT=1, which CI sets,
// the run fails then. The tests live in a mount namespace and a network namespace of their
// own, the machines' namespaces have no names and go with whoever has them open, loop
// devices clear themselves, nodes die with their parent, and a frozen disk thaws when
// whoever froze it is gone: nothing stays behind, however a run ends, and two runs have
// nothing in common.
package chaos
