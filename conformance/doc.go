// Package conformance holds Skein against etcd itself: generated calls go to an
// embedded etcd of the version that Skein speaks and to a Skein of three nodes in
// the same process, whose ranges split while it runs, and every answer and every
// error is compared field by field.
//
// It guarantees that a difference is reported with the seed, the number of the call
// and both answers; that a seed gives the same calls again; and that nothing but
// what normalised lists is left out of the comparison. A serializable read is compared
// with etcd's at the revision that it says it was made at. It does not inject faults
// (package sim does) and says nothing of speed.
//
// The calls come from a table of generators (kinds), those of locks and elections and some
// by HTTP and JSON among them. One call at a time, any
// difference is one of semantics (Lockstep). Several at a time through all gateways
// (Waves), Skein's own revisions say in which order they took effect; etcd gets the
// calls in that order, and must have given the same answers.
//
// Its other tests run clientv3's mutex, election and STM: many clients through all nodes,
// over ranges that split meanwhile, right between the keys of those who wait for one lock.
// Of each they guarantee what its users rely on: that nobody else holds what one holds,
// that who held it before is told so by its fencing revision, that there is one leader
// at a time and who observes sees the same ones in the same order, and that transactions
// of STM are serializable. All runs are counted and none is timed; only the death of a
// holder takes as long as its lease. And they run the storage suite of kube-apiserver,
// which is a module of its own for what it requires (conformance/apiserver).
//
// Only tests and the people who run them call it.
package conformance
