package shard

import (
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/pipeline"
)

// pipelineEnv is a replica as its pipeline sees it.
type pipelineEnv Replica

var _ pipeline.Env = (*pipelineEnv)(nil)

// Takes implements pipeline.Range.
func (e *pipelineEnv) Takes(req *rangeapi.Request) (wait <-chan struct{}, err error) {
	r := (*Replica)(e)
	if _, err := r.servesLocked(req); err != nil {
		return nil, err
	}
	if req.Generation != r.rec.Generation {
		return r.changedLocked(), nil // the range is to absorb its neighbour first
	}
	return nil, nil
}

// MayEvaluate implements pipeline.Range.
func (e *pipelineEnv) MayEvaluate() bool {
	return e.change == nil && e.doubt == nil && !e.rec.Merge.StandsStill()
}

// Error implements pipeline.Range.
func (e *pipelineEnv) Error(k kverror.Kind, detail string) *kverror.Error {
	return (*Replica)(e).errorLocked(k, detail)
}

// Notify implements pipeline.Range.
func (e *pipelineEnv) Notify() { (*Replica)(e).notifyLocked() }

// BeginPass implements pipeline.Evaluator.
func (e *pipelineEnv) BeginPass(pass *pipeline.Pass) {
	pass.Store = eval.NewPassStore(e.data, &e.appliedBatches)
}

// Input implements pipeline.Evaluator.
func (e *pipelineEnv) Input(pass *pipeline.Pass) eval.Input {
	in := eval.Input{Store: &pass.Store, Floor: e.store.Floor()}
	if e.store.cfg.Leases != nil {
		in.Leases = (*attachableLeases)(e)
	}
	return in
}

// attachableLeases is a replica as the evaluation asks it for leases.
type attachableLeases Replica

// Attachable implements eval.Leases.
func (a *attachableLeases) Attachable(lease keyspace.LeaseID) bool {
	r := (*Replica)(a)
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.leases.attachable(lease)
}

// NoSpace implements pipeline.Evaluator.
func (e *pipelineEnv) NoSpace() error { return e.store.noSpace() }

// AwaitLease implements pipeline.Evaluator.
func (e *pipelineEnv) AwaitLease(c *pipeline.Call, lease keyspace.LeaseID, out *pipeline.Answers) {
	(*Replica)(e).awaitAttachmentLocked(c, lease, out)
}

// Sequence implements pipeline.Sequencer.
func (e *pipelineEnv) Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer)) {
	e.store.cfg.Sequencer.Sequence(req, done)
}

// Observe implements pipeline.Sequencer.
func (e *pipelineEnv) Observe(a keyspace.SequenceAnswer) { e.store.observe(a) }

func (e *pipelineEnv) SequencerTerm() uint64 { return uint64(e.store.sequencerTerm.Load()) }

// Propose implements pipeline.Log.
func (e *pipelineEnv) Propose(term uint64, entry []byte, dropped func(error)) error {
	return e.group.Propose(term, entry, dropped)
}

// LeaseHeld implements pipeline.Log.
func (e *pipelineEnv) LeaseHeld(term uint64) bool { return e.group.LeaseHeld(term) }

// ReadIndex implements pipeline.Log.
func (e *pipelineEnv) ReadIndex(done func(index uint64, err error)) { e.group.ReadIndex(done) }

// Committed implements pipeline.Log.
func (e *pipelineEnv) Committed() raftgroup.Commit { return e.group.Committed() }

// Wake implements pipeline.Log.
func (e *pipelineEnv) Wake() { e.group.Wake() }
