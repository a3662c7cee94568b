// Package follow tests package mirror with real etcds as the source: a cluster of three whose
// leader is killed while clients write. The target is in memory, keeps every version, and
// checks their order. The test compares it with the source at many revisions.
package follow
