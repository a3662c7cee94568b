// Package concurrency runs clientv3's mutex, election and STM against a Skein of three
// nodes: many clients through all of its nodes, over ranges that split meanwhile, right
// between the keys of those who wait for one lock.
//
// It guarantees, of each, what its users rely on: that nobody else holds what one holds,
// that who held it before is told so by its fencing revision, that there is one leader
// at a time and who observes sees the same ones in the same order, and that transactions
// of STM are serializable. All runs are counted and none is timed; only the death of a
// holder takes as long as its lease.
package concurrency
