// Package stages says where the time of a request went. The slow log, the list of slow requests and the
// spans of traces are made of its records.
//
//	etcdapi ── Call, in the request's context ──▶ router ──▶ bus ──▶ shard: the leader of a range
//	   ▲           retries, waits for revisions      │                  │ Record: places of the request
//	   └─ Slow ◀── cause ◀───────────────────────────┴── Note ◀─────────┘
//
// A fast request pays for none of it: a leader makes a [Record] only of a request that took longer than
// [Threshold], or that is traced, from readings of the clock that its batch takes anyway. A [Call] takes the
// place of the context that would carry the request's permit.
//
// Records have ids of ranges, nodes and transactions, and sizes. They have no keys, values or users: logs are
// read by others than the store.
//
// The stages of a leader follow each other and add up to the time that it had the request. Some are not
// exact: the calls of one pass of evaluation share the readings of the pass.
package stages
