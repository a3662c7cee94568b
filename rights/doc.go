// Package rights is what users and roles mean: how changes change them, and what a user may do. It is
// a pure function of the changes applied. It knows no clock, no network and no bytes on disk.
//
// A user has roles, and a role has permissions: to read, to write, or both, one key or a span of keys.
// The user whose roles include root may do everything. etcd 3.7 is the contract, with its order of
// checks and its errors. Differences are named where they are.
//
// # Who uses it
//
// The placement group replicates a [State]: each of its replicas applies each [Change] at the same
// index of the log, so all have the same state. Every node has a copy, makes a [Subject] for each user
// who sends it requests, and asks that.
//
// # What it guarantees
//
// R1. Apply depends on the state, the index, the caller and the change alone. A refused change changes
// nothing.
//
// R2. The access index is the index of the newest change after which somebody may do less than before.
// A subject of a state with the same access index may do nothing that it may not do now. A change that
// only gives leaves the index where it is.
//
// R3. A user's Since grows whenever what proved the user's identity before must not do so any more:
// when the password changes, or the user is created, perhaps for a second time.
package rights
