// Package recovery brings a cluster back that has lost the majority of its nodes for good. It works on
// the directories of nodes that do not run; docs/RECOVERY.md is for operators.
//
//	survivors' directories ──Collect──▶ a file of each ──MakePlan──▶ plan ──Apply──▶ the directories
//	                                                       │ pure
//	                                                       ▼
//	                                    what is kept, safe, doubtful, lost
//
// # How it works
//
// For each group the survivor with the newest log becomes the only voter. Package raftgroup/offline
// appends that to its log, as entries that count as committed. So at its next start the node itself
// applies the whole tail, splits and merges included, and then the change. walk follows the tails before: it knows
// what the group will be then, and which replicas its splits make.
//
// A range's other copies get the note that bars their replicas, and the node deletes their data at its
// start. Placement's tail is applied here, which is pure, and its map, node table and ceiling are written anew. Its
// other copies are deleted at once.
//
// # What it guarantees
//
//  1. What a plan calls safe is: each acknowledged write is in the copy that goes on (see judge).
//  2. No revision is given out twice: the next one is above all that any survivor knows, by more than
//     was under way. No id of a range or a replica is used again, and terms and generations rise.
//  3. The new map covers each key once, by the range that held it last.
//  4. Apply is durable step by step and may be repeated. Until it is done the node does not start.
//  5. A plan is applied to the state that it was made for, or not at all.
//  6. No node goes on by a plan before all its survivors have applied it (node.recovered). One that has not may go on
//     by the old members of a group: so it never does beside the new ones.
//
// # What if …
//
//   - a tail has a split whose child goes on here, and the copy itself goes: it applies its tail up to
//     the split, and leaves its group there (Leave).
//   - a tail absorbs a neighbour: the neighbour's frozen copy stays beside it until then.
//   - a merge binds ranges: it is ended by the entry that ends an aborted one.
//   - another range has held a part of a copy's span since: the copy is split around it.
//   - a split was never committed: see doubtSplits and foundation.
//
// # Files
//
//   - force.go: All steps on one directory.
//   - verify.go: The running cluster compared with the plan.
//   - apply.go: What a plan says, done on one node.
//   - collect.go: What a node has.
//   - dir.go: The directories of a node, opened.
//   - walk.go: A range's tail, followed.
//   - plan.go: What becomes of each group, and what is done for it.
//   - cover.go: Which range has which keys.
//   - report.go: The plan for people.
//   - format.go: The files.
//   - text.go: Keys, ids and members in files.
package recovery
