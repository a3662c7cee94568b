// Package pipeline takes the operations of one range from admission to answer. It queues them,
// evaluates them one after another, and asks for their revisions in batches. It proposes each
// batch as one entry and answers once the entry is applied. It works while the range's replica
// leads. It knows no replica and no other node; [Env] is its view of them. Package shard/eval
// evaluates a request, shard/locktable decides who waits for locks, and shard/command has the
// form of an entry.
//
//	callers              the pool               the sequencer          the log
//	───────              ────────               ─────────────          ───────
//	Run/Start▶ queue ─▶  pass: Gate,      ─▶ filling ─▶ sequencing ─▶ proposed ─▶ Applied
//	   ▲         ▲       Evaluate, Place        │          │             │           │
//	   │         │              │               │          ├─ parked     │           │
//	   │         └──────────────┴─ put back ────┴──────────┘             │           │
//	   │                                 overlay: ◀─ added ───────────── removed ────┤
//	   └────────────────── Send ◀── confirm: lease or ReadIndex ◀── held ────────────┘
//
// A pass runs in the goroutine of a caller that waits for its answer and finds nothing in its way, else in the pool.
// One batch fills while one is sequenced; several may be with the log. So the pipeline never
// waits for a round trip to evaluate, and batches grow with the load. A pipeline without calls
// has no goroutine, timer or channel.
//
// An [Operation] is what a call does. There are two implementations: a client's request, which is
// this package's, and a command of a transaction over several ranges, which the replica brings.
//
// # States of a call
//
// A call is in exactly one place, and only moves along these arrows (place, moveTo):
//
//	caller ─▶ queued ─▶ in evaluation ─▶ in a batch ─▶ answered      a write: its entry is applied
//	            ▲             │              │
//	            ├── parked ◀──┤              ├─▶ queued                it asked for the current revision
//	            ├── blocked ◀─┤              ├─▶ held ─▶ confirming    it has seen what is not applied
//	            └─────────────┘              └─▶ confirming ─▶ answered
//
// Parked: the evaluation needs a revision that a batch is about to get. Blocked: a lock is in the
// way. Held: it changes nothing, and waits for the batch of which it has seen a version. Any place
// but the caller's may be followed by an error.
//
// # States of a batch
//
//	filling ─▶ sequencing ─▶ proposed ─▶ applied
//	   │           │             ├─────▶ lost      the leadership ended, and the log tells the fate
//	   └───────────┴─────────────┴─────▶ discarded
//
// # What it guarantees
//
// S1. A batch belongs to the leadership in which it was evaluated: a term, and within the term a
// chain. Each entry names the entry on which it was evaluated. It applies only on that one, in its
// own term and generation; otherwise it is a no-op on every replica alike. So a write that is lost
// in the middle takes with it all that were evaluated on top of it, and no stale compare wins.
//
// S2. Everything that can refuse a request is settled before a revision is asked for (package
// eval). After that only the loss of leadership drops a write.
//
// S3. An answer that shows what is not applied yet is held back until it is. A write waits for its
// own entry. A request that changes nothing waits for every pending version that it saw, and then
// for a confirmation of the leadership.
//
// S6. A call that fails says whether it may have been applied. "Not applied" is certain: the call
// was never proposed, its proposal was dropped, or an entry of a newer term precedes it in the
// log.
//
// A call that was admitted is answered exactly once, whatever its caller does. Where nobody waits for it (Start), whoever answers
// says so, without mu. Its bytes are given
// back then. Calls are evaluated in the order in which they came, but for those that wait for a
// revision or a lock. One that was put back patience times is evaluated before all that came after
// it. Revisions rise along the chain.
//
// # Bounds
//
// [Budget] bounds the bytes of a node's calls, [Limits] the queue of a range, the calls and bytes
// of a batch, the batches with the log, and the time of a pass. A pass looks at its time after
// each few calls or keys, and after each call once its slot is lent. [Pool] bounds the passes that use the processor, and those that wait for
// the disk. A call beyond the budgets is
// refused with TooManyRequests; at the other bounds it waits. Commands that end locks have a
// budget of their own, since others wait for them.
//
// # What if …
//
// … the leadership ends while a batch waits for revisions? The batch and the overlay are
// discarded, and its calls are answered as not applied. The late answer is ignored: its batch is
// nobody's any more. The numbers bear no event.
//
// … it ends after the proposal? The batch is lost: its calls wait for the log. The entry itself
// answers them, or the first entry of a newer term says that it never comes, or a snapshot shows
// it. Beyond FateTimeout they get etcd's error for an unknown fate.
//
// … the sequencer refuses, or a proposal is dropped in a term that goes on (a transfer that
// failed)? The chain is cut there. The batches behind the cut are discarded, and those of
// them that are in the log apply nowhere. The next batch is evaluated on the last entry before the cut.
//
// … rights were taken from somebody since a request was permitted? The sequencer refuses the batch. Calls whose permit
// has ended get AccessChanged, and the other requests are evaluated again, in their order. From then on the range
// refuses such permits itself, so one gateway that lags behind costs the others one batch.
//
// … a pass waits for the disk, or scans for long? After a millisecond or two it counts as
// reading: another pipeline that waits gets its slot for the processor. From then on the pass ends
// after the call in which its time is over. Its own range waits for that call; the others wait only
// if all workers read.
//
// … the group has no room? The entry is offered again every 2 ms, and the next batch waits.
//
// … the overlay is thrown away during an evaluation? In the same term the call is evaluated again;
// otherwise it is answered as not applied.
//
// … a caller gives up? A blocked call is answered at once, a queued one when its turn comes. What
// is evaluated goes on, and a write is still proposed.
//
// … the node stops? A drained pipeline refuses what waits and what comes. Batches under way
// end by themselves. Once the pipeline is idle, the replica hands its leadership over.
//
// … the range itself changes, by a split or a merge? The replica closes the pipeline, waits until
// it is idle, and proposes the change. MayEvaluate keeps it empty until the change is applied.
//
// # Locks
//
// The replica's mu guards a pipeline, its calls and batches, as [Config] says. No method holds it
// over an evaluation, a question to the sequencer, a proposal or an answer. Pass.Evaluation and
// Pass.Budget are the pass's alone. Budget guards itself. Lock order: mu, then Pool's.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	run.go           callers: admission, waiting, giving up
//	pool.go          who evaluates: the pool's goroutines, or a caller
//	request.go       the operation of a client's request
//	pass.go          one turn in the pool
//	sequence.go      revisions for a batch, its proposal
//	fate.go          what became of batches: applied, cut, lost
//	record.go        where the time of a call went
//	queue.go         the queue, and where a call goes from evaluation
//	batch.go         batches, their entries, the leadership
//	answers.go       answers, the confirmation of the leadership
//	pipeline.go      Pipeline and its Env, its state
//	schedule.go      which pipelines wait for the pool, which passes for the disk
//	budget.go        bytes of a node's calls
//	call.go          calls and their places
//	operation.go     Operation, Pass
//	metrics.go       metrics
//	mutation_off.go  no mutations
//	mutation_on.go   mutations, with the build tag planted
package pipeline
