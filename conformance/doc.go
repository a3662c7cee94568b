// Package conformance compares Skein with etcd itself. Generated calls go to an
// embedded etcd of the version that Skein speaks and to a Skein of three nodes in
// the same process, whose ranges split meanwhile. Every answer and every error is
// compared field by field.
//
// It guarantees that a difference is reported with the seed, the number of the call
// and both answers, that a seed repeats its calls, and that only the fields in
// normalised are ignored. A serializable read is compared with etcd's answer at the
// revision of Skein's answer. The package injects no faults (package sim does) and
// measures no speed.
//
// The calls come from a table of generators (kinds). Among them are those of locks
// and elections, and some by HTTP and JSON. Skein gets half of its reads and changes
// by the pipe; the seed says which. With one call at a time, any difference
// is one of semantics (TestLockstep). With several at a time through all gateways
// (TestWaves), Skein's own revisions say in which order they took effect. etcd then
// executes them in that order and must give the same answers.
//
// Users, their rights and their tokens are compared in two more ways. Calls are made as users whose rights change
// meanwhile (TestLockstepUsers). And every method is called by everybody with everything that matters for rights
// (TestAccessMatrix): the requests are made from etcd's descriptors and a table of their fields. Differences that
// stay are a table too (differences), and docs/CONFORMANCE.md says the same.
//
// Other tests run clientv3's mutex, election and STM: many clients through all nodes,
// over ranges that split between the keys of clients waiting for one lock. They check
// what users rely on:
//
//   - Only one client holds a lock, and its fencing revision unmasks an older holder.
//   - There is one leader at a time, and all observers see the leaders in one order.
//   - Transactions of STM are serializable.
//
// Runs are counted, not timed; only the death of a holder takes as long as its lease.
// The storage suite of kube-apiserver is a module of its own because of its requirements
// (conformance/apiserver).
//
// Only tests and the people who run them call it.
package conformance
