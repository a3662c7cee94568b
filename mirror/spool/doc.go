// Package spool is a durable queue of revisions: what happened at the source of a mirror,
// kept in a directory until the target has it.
//
// # What is guaranteed
//
//   - A revision is read as a whole or not at all. It is written in pieces, so that a
//     revision of any size needs little memory, and counts when its end is synced.
//   - Revisions are without a gap: Append refuses any but the next one. Skip says of those that
//     have no event that there is none.
//   - What was read survives every crash: readers see only what is synced.
//   - A torn tail is cut. Damage to what a later segment calls whole is an error.
//   - A spool belongs to one source. A lock keeps a second process away.
//
// # How it works
//
// Segments are only appended to, never changed: after a crash, a failed write or a
// revision that broke off, Rollback begins the next segment, whose header says where the
// one before ends. So no old byte can be taken for a new one. The disk may be full: then
// Append or Sync fails, and Rollback succeeds once there is room. What was lost is asked
// for again at the source.
//
// One goroutine writes. Readers are independent of it and of each other.
// docs/format/spool.md describes the bytes.
package spool
