// Package judge says what is wrong with the answers that clients of a cluster had.
//
// A run collects Evidence: a History of calls and answers, the versions on the disks, and what watchers, users and
// readers of cuts were told. Check returns what contradicts etcd's promises. The simulator (package sim) and the storms
// of real processes (package chaos) are judged by it.
//
// It knows nothing of Skein's inside. It is written from etcd's documentation and uses etcd's messages, beside the
// cuts, which are Skein's own. For each check a test shows that it rejects a history with its kind of error.
//
// # Files, callers above what they call
//
//   - check.go: the evidence, and which checks it passes
//   - linear.go: the search for an order that explains all answers
//   - cuts.go: what was read of cuts
//   - leases.go: how long leases lived
//   - access.go: what users did by which right
//   - watch.go: what watchers were told
//   - stream.go: the order of events and progress on one stream
//   - replay.go: all changes in the order of their revisions, and every answer at its revision
//   - realtime.go: revisions against real time
//   - loaded.go: a store that was there before
//   - rights.go: what users might do, and when
//   - requests.go: what requests are about
//   - model.go: etcd's keyspace at one revision
//   - history.go: calls and answers
//   - version.go: versions of keys
//   - keys.go: the keys and the clients of a run
package judge
