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
// Only tests and the people who run them call it.
package conformance
