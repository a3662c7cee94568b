// Package rangefeed tells gateways the events of ranges, in the order in which a replica
// applies them.
//
// A feed is the events of one range on their way to one gateway. Applied events are facts,
// so any replica can feed: a feed needs no leader and no lease, and the range may sleep.
// The package knows a replica as a Source of three methods, and the store as mvcc on the
// node's engine. It does not merge the feeds of several ranges; package watch does.
//
// # What is guaranteed
//
//   - A feed tells every event of its range from its first revision on. It ends rather than
//     leave one out.
//
//   - A live feed tells events in the order of application. A feed that reads the store tells
//     them by revision. Those above the resolved revision may come twice.
//
//   - A part's resolved revision says: Every event at or below it that there will ever be, on
//     any replica, has been sent.
//
//   - A part's position says: Everything that was applied up to it has been sent. It is zero
//     if that cannot be said.
//
//   - No gateway slows an apply down. Queues, pages and messages are bounded in bytes, for
//     each feed and for each gateway; beyond that a feed goes on from the store.
//
//   - Events of an applied batch are encoded once for all feeds, and not at all if there are
//     none.
//
// # How it works
//
//	apply ── Capture ──▶ Events ─▶ Publication
//	                                   │ Applied, the replica's lock held
//	                                   ▼
//	Feeds of the range: Publish ── offer ──▶ queue of each feed ──▶ ready
//	                                   │ full                        │
//	                                   ▼                             ▼
//	gateway's orders ─▶ obey       hungry ─▶ read ─▶ page ────────▶ send ─▶ gateway
//	                                          │
//	                                        store: mvcc.HistoryPages, versions before
//
// Three goroutines serve a gateway: one takes orders, one reads history, one sends. A feed
// has none. Feeds take turns, a page at a time and a queue at a time.
//
// # States of a feed
//
//	 add, all wanted events are to come
//	──────────────────────────────────────▶ live ◀──────────────────────┐
//	                                         │ queue full, Restart      │ page up to the
//	 add, some are applied already           ▼                          │ state joined
//	──────────────────────────────────────▶ behind ─ page up to the ─▶ joining
//	                                         ▲       resolved revision  │
//	                                         └── queue full, Restart ───┘
//	any ── End, an error of View or StillShows ─▶ ended, behind what was queued while live
//
// A feed that is behind is not given what is published. It reads the store up to the resolved
// revision: Above it, a transaction may yet leave a version below what was read. The feed
// notes the lowest event that it was not given. Its next page begins there if that is lower.
// When a page has reached the resolved revision, the feed joins. It queues what is published
// from then on, and reads all that was applied by then.
//
// # What if
//
//   - A gateway takes nothing: The queue fills, and the feed goes on from the store. The
//     events of its queue go; pages that were read stay read.
//
//   - An old lock keeps the resolved revision down: A feed that falls behind does not read
//     again what it has read. It begins to join when it has read up to the resolved revision.
//
//   - A transaction leaves a version below events that were sent: It comes as an event of its
//     own. The resolved revision was below it until then.
//
//   - The range is split or absorbs a neighbour: The owner publishes what came before, then
//     calls End with the descriptors of the heirs. Their feeds begin where this one ended.
//
//   - An event waits with a slow gateway, and the range is split, or its replica ends, before the
//     version before is looked for: That version may be gone with the child's replica. The feed
//     ends in front of the event. Other feeds of the gateway go on.
//
//   - A snapshot replaces the replica's state: The owner calls Restart, and each feed reads
//     the store again from behind its resolved revision. If the snapshot brings another
//     generation, the feeds end.
//
//   - A snapshot is being installed while a page is read: Its tables are in the store before
//     the replica learns of it. StillShows and Compacted look at the snapshot's record. Its sender
//     may have been removing what is compacted, so it may have an older version than the one
//     before an event.
//
//   - Compaction removes versions that a page wants: View and StillShows refuse, and the feed
//     ends with Compacted.
//
//   - A feed begins while a batch is applied: The batch was not captured, so its publication
//     is one that missed events. All feeds of the range read the store again.
//
//   - One revision is larger than a message or a page: It comes in several parts or pages.
//     Only the last part of a block has the block's resolved revision.
//
//   - A message cannot be sent: The stream ends, and the gateway opens all feeds anew.
//
// # Locks
//
// A replica's lock is taken before a connection's. The replica's lock guards its Feeds; the
// connection's guards the state of its feeds. Neither is held over the store or the network.
// Source.View is called with the replica's lock held, StillShows and Compacted without it.
//
// # Files
//
//   - server.go: The Server, and a gateway's stream with its goroutines.
//   - conn.go: The stream, its feeds, and the gateway's orders.
//   - read.go: Pages of history for feeds that are behind.
//   - send.go: Messages.
//   - feeds.go: The feeds of one replica, its Source, and publication to them.
//   - queue.go: The states of a feed, its queue and its page.
//   - history.go: Events read from the store, and the versions before them.
//   - block.go: Captured events and publications.
//   - metrics.go: The metrics.
package rangefeed
