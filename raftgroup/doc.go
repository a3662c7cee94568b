// Package raftgroup runs many raft groups on one host. It is the engine that all
// ranges and the placement group stand on; it knows raft's messages and a
// StateMachine, and nothing of keys or of placement.
package raftgroup
