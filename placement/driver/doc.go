// Package driver decides what is to be changed in a cluster and executes it, on the node that
// leads the placement group: a snapshot of the replicated state in, operations out.
//
//	View (map, nodes, operations) ──▶ decider ──BeginOperation──▶ placement group
//	reports of nodes ──▶ Tracker ──────▶  │ ▲                          │
//	who lives ────────────────────────────┘ │ how it ended             ▼
//	                                      operator ◀── operations under way
//	                                          └──▶ Mover, Merger: one step at a time
//
// Two goroutines run in each leadership. The decider feeds a model of the cluster
// (decide.Cluster) with what has changed and asks it for operations, once a second. The
// operator executes each operation of the View until it is over. Package decide holds the
// decisions themselves, which are pure.
//
// # The life of an operation
//
// BeginOperation takes it in, with an id: the index of that entry. From there on the record
// and the range's own descriptor are all there is of it. NextStep tells the next step from
// these two alone, so any later leader goes on where the last one stopped. A step that is
// repeated is refused by the range, whose configuration has changed. When nothing is left to
// do, the map learns the range's descriptor, and then EndOperation drops the record. An
// operation without a step for too long ends where it stands: what it leaves behind, perhaps a
// learner, is decided upon anew.
//
// # The life of a merge
//
//	preparing ──bind──▶ binding ──commit──▶ committed    the left range absorbs the right one
//	    │                  │
//	    └── abort: over    └──── abort ───▶ aborted      both ranges are released
//
// While it prepares, the right range's replicas move to where the left one's are, and both get
// one leader. Then the ranges are bound, every node stores what it has, the right range is
// frozen, and the commit replaces two rows of the map by one. The right range stands still for
// 2 s at most; else the merge is aborted.
//
// # What it guarantees
//
// D1. A decision is compared with the View when it is proposed and with the state when it is
// applied. What has changed in between refuses it.
//
// D2. A range has one operation at a time, and a merge is one on both of its ranges.
//
// D3. Nothing is decided before every living node has reported once, or 30 s have passed.
//
// D4. A new leader needs nothing from the one before: Tracker and model begin empty and are
// filled from the View and from reports.
//
// # What if …
//
// … the leader dies in the middle of an operation? The next one reads the record and goes on.
// A merge that was binding is aborted: the right range may be frozen.
//
// … a report of a node is lost? Its parts are numbered. The Tracker asks for everything again.
//
// … a node is silent? Its replicas are rebuilt after NodeDeadAfter. Operations that wait for it
// are given up sooner.
//
// … the placement group itself must change? It has operations like a range, with OwnGroup as
// their range. decide_own.go decides them, one at a time, and never for balance.
//
// # Locks
//
// The decider's model belongs to its goroutine. decider.mu and operator.mu guard what the two
// tell each other, and neither is held while the other is taken, nor over a call. The
// Tracker's mutex guards itself.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	driver.go      Driver: a leadership begins
//	decider.go     decider: what it tells the model, and its rounds
//	decide_own.go  decisions for the placement group itself
//	operate.go     operator: operations under way are worked on
//	merge.go       a merge is worked on
//	steps.go       the next step of an operation
//	begin.go       a decision begins as an operation
//	leaving.go     nodes that leave are removed once they are empty
//	look.go        what a range's leader says of it
//	tracker.go     Tracker: reports of nodes
//	report.go      parts of a report, and their form
//	metrics.go     metrics
package driver
