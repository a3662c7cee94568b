// Package chaos breaks three real skein processes while clients use them, and
// judges what the clients were told. All of it is in its tests; nobody imports it.
//
// # What breaks
//
// Any node, or several: kill -9; SIGSTOP for longer than lease and election timeout;
// a power cut; a disk that hangs; a disk that is full. For the last three each node's
// data lies on an ext4 of its own in a loop file. EXT4_IOC_SHUTDOWN without a flush of
// the journal is the power cut: what no fsync had made durable is gone, which kill -9
// alone does not show, for it leaves the page cache. FIFREEZE is the disk that hangs:
// whoever writes waits.
//
// # What is judged
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
// # How to run it
//
//	make chaos-local SEED=7 DURATION=10m
//
// SKEIN_CHAOS_SEED and SKEIN_CHAOS_DURATION are the same for go test; without a
// duration each fault happens once. The seed fixes schedule and workload, not the
// threads of four processes. A failed run keeps history and logs where go test
// -artifacts says.
//
// Loop files and mounts take root, mkfs.ext4 and fsfreeze. What is missing is printed,
// and the rest runs; with SKEIN_NOTHING_LEFT_OUT=1, which CI sets, the run fails then.
// The tests live in a mount namespace of their own, loop devices clear themselves,
// nodes die with their parent, and a frozen disk thaws when whoever froze it is gone:
// nothing stays behind, however a run ends.
package chaos
