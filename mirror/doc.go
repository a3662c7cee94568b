// Package mirror follows a running etcd into a cluster that is loaded, until the cluster takes
// its place.
//
// # What is guaranteed
//
//   - Every revision of the source behind the snapshot reaches the target once, whole and in
//     order, with create revision, version, lease and the order of its writes.
//   - A gap in an etcd's revisions stops the mirror. A write that does not follow on what the
//     target has stops it too, and the error names the key.
//   - While it follows, the target has few leases more than the source. None with keys is taken back.
//   - Whatever is killed, and whenever, the next start goes on.
//   - The target is opened only at a revision at which the source stands still, and that the
//     target has as a whole. The next write is that revision + 1.
//   - Memory is bounded: a batch, a few answers of the watch, two pages.
//
// It does not stop the clients of the source; the operator does. If somebody writes there
// behind the cut-over, the status says so.
//
// # How it works
//
//		source --watch--> receive --> spool --> apply --> target
//		  |                (disk)                 ^  create and version must fit
//		  +--snapshot--> file --> Target.Import --+
//		  +--pages--------------> verify <--pages-- target
//
//	 1. copying: a watch of all keys fills the spool, from the revision at the start on. Then a
//	    snapshot is fetched, of a member that has reached that revision.
//	 2. importing: the target loads the file.
//	 3. following: revisions go from the spool to the target in batches. Meanwhile pages of
//	    both are compared, each at a position that the target had within the last seconds.
//	 4. finishing: after a cut-over was requested and the source has stood still for two seconds,
//	    counts and leases are compared and the target is opened with the source's leases. No
//	    cut-over can be requested before all keys were compared once, by this process or an
//	    earlier one: that may take hours, and the source's clients stand still meanwhile.
//
// The target's position is the only one: the spool is asked for what comes behind it, and a
// batch whose fate is not known is brought again. A revision that is larger than a batch comes
// in parts and is visible with the last one.
//
// # The sum
//
// The mirror sums up the hashes of all versions that the source has shown, and the target opens
// only if it has exactly these. The sum is the source's and never the target's, also across a
// crash: it is written each second with the revision up to which it counts, and the spool keeps
// what lies above. The next start counts from there, and brings what lies above the position.
//
// # Leases that end
//
// Each half minute the leases that the target has are compared with the source's. One that was dead
// there is taken back, once the target has all revisions up to a moment behind that: so no key is
// attached to it. The source's are listed by a member that has just answered a linearizable read.
// A member of etcd that is cut off leaves out what was granted since.
//
// A batch attaches keys only to leases that live. When a leader of etcd is started anew, the source may say for a moment of a lease that
// was granted just before that there is none. So it is believed only where the source has none of the lease's keys any more
// as the batch has them.
//
// # Steps and requests are files
//
// The step is a file in the directory, replaced by a rename. A request (cut over, abandon) is a
// file too, which the mirror looks for. So a request needs no port, no second protocol and no
// running mirror: one that is killed and started again still finds it. Another process reads
// the status from a file as well, and sees by the lock whether a mirror runs. A request to cut over
// that cannot be met is removed, and the status says why.
//
// # What if ...
//
// I1: the source compacts what the mirror lacks. The mirror stops for good and says: begin
// anew. Before that, the spool keeps what the target has not taken yet.
//
// I2: a member lags, or the leader is lost. The watch demands a leader, asks for progress each
// second, and is opened again at the next revision where it is silent or breaks. A snapshot is
// taken only of a member that is far enough, and its revision is read before it is imported.
//
// I3: the source is restored or replaced. A revision that is not the next one stops the mirror for good. An answer of another
// cluster ends it: somebody else may listen at an address of the source, so it can go on without that address.
//
// I4: the disk is full. What is not synced is dropped and asked for again once there is room.
//
// I5: the mirror is killed while the target is opened. What it is opened with stands in the
// state, so the next start opens it in the same way.
//
// I6: the source is a Skein. A crash there leaves revisions without events. The source's watch says that nothing is
// missing, so they are skipped, in the spool too. An etcd has none, and a gap there stops the mirror.
//
// # Locks
//
// Mirror.follow is held while something is brought to the target, and by a cut-over from its
// last look at the source to its end. Mirror.statusFile is held while the status is written.
// Mirror.mu guards the status. They are taken in this order; mu is not held over a request.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	run.go      Run: the steps
//	receive.go  from the watch to the spool
//	follow.go   from the spool to the target
//	verify.go   pages of both sides compared
//	cutover.go  the end: stand still, compare, open
//	leases.go   leases of the source, looked up ahead, and taken back once they have ended
//	mirror.go   Mirror: its state, retries, the status
//	metrics.go  the status for Prometheus
//	state.go    the files of the directory, requests of other processes
//	etcd.go     the source as etcd's API shows it
//	parts.go    Source, Target, Options
package mirror
