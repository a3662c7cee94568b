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
// # The life of a decision
//
// Reports. Each node tells placement's leader the ranges that it leads, with their terms, bytes and
// load, how full its disk is, its replicas in quarantine, and whether it takes no more data. It
// tells everything once, then every 10 s what has changed by much: a sixteenth of the bytes or an
// eighth of the load. Steps below 1 MiB and 10 requests a second (or a 64th of what splits a range,
// if that is less) are not reported. A new leader of a range is reported after a second. Reports
// are numbered. A leader that misses one, or is new, asks for everything; nothing is stored.
// Reports about a range that the map does not have are kept for ten minutes. Ranges without a known
// leader are asked themselves, 64 of them every 10 s. A node without a replica of the placement
// group learns from the end of its feed of the map that placement has another leader, or none, and
// then reports at once.
//
// State. Placement's leader (decider) has the map, the node table, settings and operations from
// the placement group. Beside them it keeps the reports, since when it has not heard a node, and
// whether each node hears half of the others, which liveness messages say. A node that does not
// is isolated. It hands over what it leads and keeps what it has. It gets neither leaders nor
// replicas, with one exception: a range, or the placement group, that the next loss would stop
// and that no other node can take. A risky copy is better than none. Such a copy may never
// arrive. Its operation is given up for a better node as soon as one is there and the isolated
// one has been isolated for 30 s. It is never given up for another isolated node, whose turn
// comes when the operation's time is over. If no node hears half of the others, nobody is
// treated as isolated. A new leader starts with what is replicated, counts all silence anew and
// continues the operations that it finds. It decides nothing before it has heard every live
// node, or for 30 s.
//
// Round. A round runs every second, and when an operation has ended. decide says what is most
// urgent and what nodes can bear. The requirements of each decision are compared with the
// present state. Then its operation goes through the placement group, which compares generation
// and configuration of the range again when it applies the entry. The entry does nothing in
// another term than its own. So a leader and a former leader cannot both change a range. A
// refused operation leaves no trace and may be proposed again.
//
// Execute. The operation executes like any other (see below). Its record has the reason,
// which skein placement operations shows as the metrics' word (command for what somebody has
// asked for) and as a sentence. Its end makes room for the next one.
//
// Lists for operators. The node that is asked takes its map of the ranges, lays over it what
// every replica says of itself, and uses the highest generation for each key. If keys are
// missing, as behind a split, it asks again for up to 3 s and then says which are missing. A
// range is merging from the commit of its merge until its leader has absorbed the other one. If
// the placement group has no quorum, the list shows what one of its replicas knew last, marked
// as stale. No command that waits takes that for an end, and nothing is changed by it.
//
// Copies that do not arrive. A copy may not arrive in the time of its operation, for example because
// the leader does not reach the node. Then the other nodes that can take it get their turns. If
// ranges are to have fewer voters, voters on drained nodes go first when the others are only a
// quorum of the new number: a drained node may be stopped at any time.
//
// Lost nodes. A node that has been silent for --node-dead-after counts as lost. A decommissioned
// node counts as lost at once. Its replicas are rebuilt on others, first those of ranges that
// one more loss would stop. If it is back in time, nothing happens. If it is back later, it
// finds that it holds nothing and gets its share by balance.
//
// Boots in a row. A node that starts again and again may never be silent for so long. A restart may
// come before the boot before it has lasted. From the second such restart on, the node counts as silent
// since the first one. A boot lasts if the node runs for a third of --node-dead-after. The node is
// trusted again then.
//
// Quarantine. A replica whose state its node cannot trust is closed for good (raftgroup.Host.Quarantine).
// Its node reports it, and from then on it counts as a voter of a dead node, at once: nobody waits for
// it, and no leader goes to it. It is replaced on another node if one is there that suits the range as
// well. Otherwise, as with three nodes that hold three replicas each, it is removed, and the range gets
// a new voter on the same node, with a new id. A range without a quorum outside of quarantine is left
// alone.
//
// Settings. placement.paused stops all decisions, also repairs: whoever pauses works on the cluster
// by hand and does not want a copy to begin there. Operations under way end, and those asked for
// begin. placement.replication is how many voters a range has: 1, 3, 5 or 7, by default 3. More than
// there are nodes for replicas is refused. With fewer nodes later, a range has fewer voters. For
// skein placement set-replication the asked node first checks whether the change can be completed.
// It asks all nodes, and looks at nodes that serve and are heard, room for the copies, and ranges
// without a quorum. It says how many replicas are copied and removed. Decisions then execute it, and
// skein placement show counts the ranges with too few or too many voters.
//
// The placement group has five voters in a cluster of five or more nodes that serve or are drained,
// else three, and no fewer than ranges are to have. So a cluster that grows gets as many as one that
// was bootstrapped as large (fsm.PlacementVotersFor). A voter is added only if all are heard and
// there are nodes for an odd number. For fewer than three it is added at once, else after this has
// been so for 30 s. Voters go with nodes that leave. If that leaves an even number, with a voter on
// each node, one more goes: of four voters as of three, one may be lost. More voters than these stay
// if an operator has added them. If some of its voters share a zone and another zone has fewer, they move there one by one,
// except the leader's. They do so once all have been heard and this has been so for 30 s. If three
// nodes hold three replicas each, are heard and lead about as many ranges each, there is nothing to
// decide.
//
// The sequencer sits on the node that asks it for most revisions (seat.go): where a range's leader and the
// sequencer are on one node, a write needs no other node for its revision. A node that got two thirds of them
// for 45 s is given the leadership of the placement group, if it has a voter there. Nothing moves while an operation is
// under way, or while decisions are paused. With keys spread over all nodes nobody gets so much.
//
// Alarms. What a node reports of itself is an alarm of the cluster: NOSPACE where it takes no more data,
// CORRUPT where it has a replica in quarantine. The leader raises it in the placement group, and ends it
// with its cause. It leaves alarms alone that clients have raised.
//
// # The life of an operation
//
// Order. Somebody asks placement for an operation on a range, or placement decides it: move a
// replica from one node to another, add one, remove one, transfer the lead
// (fsm.Operation). Its record goes through the placement group. The group refuses it if
// the range has another operation under way or has changed since the decision. It gives the new
// replica an id that no replica has ever had.
//
// Steps. Placement's leader executes it. Each step follows from the record and from the descriptor
// of the range's leader, by a pure function (NextStep), so that the next leader of placement can
// continue. First the new node gets a learner, which a snapshot fills. Then, in one joint
// configuration, the learner becomes a voter and the old replica goes. A range's leader that is to
// go hands over first, to the chosen node. If that one does not follow, the leader chooses another.
// A leader that is only drained hands over to a node that is not drained. Each change names the
// configuration by which it was decided, so that a repeated step is refused. When no step is left,
// the map learns the range's descriptor, and then EndOperation drops the record.
//
// Removal. The range's leader reports its descriptor. The removed replica learns of it in one of
// three ways. It applies the change itself, or a leader says that it is no member any more, or a
// sweep of map and replicas finds it, every 10 s. It is removed when its own configuration, or a
// newer one in the map, is without it, and not earlier: group, log, data (package
// raftgroup/lifecycle). Its log goes only when everything committed in it is applied and stored. The
// log may hold a split whose child has a log of its own, with promises in it.
//
// Note. The node keeps a note of the newest replica of each range that has left it. It opens neither
// that replica nor an older one again, whoever speaks to it and whatever log is replayed. The log is
// gone, and with it the replica's promises. If it began anew, it could vote for a replica that lacks
// acknowledged entries and has not heard of the change. Together they would be a quorum of the old
// configuration.
//
// Leftovers. A learner without an operation is decided upon like anything else: a split came between
// the steps, and the other half has a learner too. An operation is ended where it stands if it makes
// no step for 10 minutes, or for 20 s if it is a transfer for balance. A copy has eight times its
// duration at --copy-bytes-per-second on top. An operation that waits 30 s for a silent node ends
// too. Its learner is then taken up or removed in the same way.
//
// The placement group changes its members by the same operations, with no range named. Its leader
// executes them. A leader that is to go hands over the operation together with the lead. It ends its
// allocations and lowers the ceiling first, so that no revision stays unused and no request fails.
// The members are part of the map, which each node hears from any replica of the group that has a
// leader. Other nodes tell their map and the leader. So a node that was away for long finds the
// group through any node that it reaches.
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
// # The life of a merge that is decided
//
// Which. Placement's leader looks for neighbours that together have at most a quarter of
// --range-max-bytes and of --range-split-load, as their leaders report them. So what was split
// for its size or load is not merged while it still has it, and a merged range has to grow
// fourfold before it is split again.
//
// When. Both have been so for --range-merge-after (an hour; 0 merges by command alone) without a
// break, and neither was split or merged for as long. A new leader of placement counts anew.
// Pausing placement stops these merges too. skein placement set-merge-after sets the time for
// the cluster, in the setting placement.merge-after (at least 5 minutes, or off). It counts from
// the next round on, whoever leads. Without the setting the nodes' flag counts.
//
// Kept borders. Borders that somebody has set: those of the bootstrap (--initial-ranges,
// --initial-split-keys) and each of skein range split, until skein range merge removes it. The
// row of the range that begins there says so (Kept, shown by skein range list and show),
// whichever range that becomes. Borders that leaders have made by themselves do not stay. A
// range waits that is busy, has a replica on a silent node, or has a need of its own.
//
// How. First the replicas of the smaller range move to the nodes of the larger one, by ordinary
// moves, if that spoils neither zones nor balance and neither has another neighbour there already.
// Then it gets the other one's leader. Then both are merged as by command. A merge that is decided
// therefore moves no replicas. It begins and commits only if both ranges are as they were at the
// decision, with voters on the same nodes and no kept border. The state machine compares this both
// times. A node leads one such merge at a time, because each has stores flushed.
//
// If it fails, it is repeated after 5 minutes, then each time after twice as long. After five
// failures it waits until one of the two has changed or another node leads placement. The
// decider reads the outcome in the map.
//
// The bounds are those of the flags of placement's leader. Nodes that split by other bounds
// would undo what it merges.
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
// … the placement group itself must change? It has operations like a range, with fsm.OwnGroup as
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
//	seat.go        on which node the sequencer had better sit
//	gather.go      whether leads had better be at the sequencer
//	alarm.go       alarms by what nodes say of themselves
//	hold.go        ends holds that nobody renews
//	operate.go     operator: operations under way are worked on
//	merge.go       a merge is worked on
//	steps.go       the next step of an operation
//	begin.go       a decision begins as an operation
//	leaving.go     nodes that leave are removed once they are empty
//	upgrade.go     the cluster version is raised by itself
//	look.go        what a range's leader says of it
//	boots.go       nodes that start again and again
//	tracker.go     Tracker: reports of nodes
//	report.go      parts of a report, and their form
//	metrics.go     metrics
package driver
