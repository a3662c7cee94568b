package shard

import (
	"bytes"
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/locktable"
	"github.com/skeindb/skein/shard/pipeline"
)

// prepareSpans returns what a Prepare locks. If a put is refused nothing will be written: the
// locks are shared, and keep the state that refuses it.
func prepareSpans(op *rangeapi.Prepare, a *rangeapi.Prepared) (spans []command.LockSpan) {
	swept := map[uint32]bool{}
	for i := range a.Results {
		swept[a.Results[i].Number] = a.Results[i].Uncounted
	}
	add := func(key, end []byte, mode command.LockMode, sub uint32) {
		if s, ok := keyspace.FromEtcd(key, end); ok {
			spans = append(spans, command.LockSpan{Span: keyspace.Span{Start: bytes.Clone(s.Start), End: bytes.Clone(s.End)}, Mode: mode, Sub: sub})
		}
	}
	for i := range op.Guards {
		add(op.Guards[i].Compare.GetKey(), op.Guards[i].Compare.GetRangeEnd(), command.Shared, 0)
	}
	for i := range op.Writes {
		w := &op.Writes[i]
		mode, sub := command.Exclusive, uint32(0)
		if a.Refused != nil {
			mode = command.Shared
		} else if swept[w.Number] {
			mode, sub = command.Sweep, w.Number
		}
		switch o := w.Op.(type) {
		case *pb.PutRequest:
			add(o.GetKey(), nil, mode, 0)
		case *pb.DeleteRangeRequest:
			add(o.GetKey(), o.GetRangeEnd(), mode, sub)
		}
	}
	return spans
}

// seal finishes the command's item and answer: its place and all revisions before it are known now.
func (s *txnCommand) seal(id rangeapi.LockID) {
	it := s.item
	switch it.Kind {
	case command.ItemLock:
		s.sealLock(id)
	case command.ItemResolve, command.ItemRelease, command.ItemCommit, command.ItemSweep:
		it.ID = s.on[0].ID
	case command.ItemFence:
		for _, h := range s.on {
			it.IDs = append(it.IDs, h.ID)
		}
	case command.ItemAttach:
		if s.registered.state == registrationAttaches {
			s.placed()
		}
	case command.ItemForget, command.ItemDetach:
	}
}

func (s *txnCommand) sealLock(id rangeapi.LockID) {
	l := s.item.Lock
	l.ID = id
	for _, p := range s.writes {
		l.Writes = append(l.Writes, p.Intent())
	}
	a := s.answer.(*rangeapi.Prepared)
	a.Held, a.Lock = true, id
	for i := range a.Results {
		a.Results[i].Create = s.creates[i].Except(s.own)
	}
	s.draft.SettleOthers(s.own)
}

// placed has those look again who wait for an attachment. Their entries come behind this one from now on, or are this one:
// nodes of keyspace.VersionLeases apply the attachments of an entry with its versions.
func (s *txnCommand) placed() {
	s.registered.state = registrationPlaced
	s.r.wokenLocked(s.r.locks.Wake(&s.registered.Held))
}

// versions calls fn with the versions that the item makes.
func (s *txnCommand) versions(fn func(v *mvcc.Version)) {
	it := s.item
	rev := it.Revision
	switch it.Kind {
	case command.ItemCommit:
		if rev = it.Record.Revision; s.on[0].Sweep() >= 0 {
			return
		}
	case command.ItemResolve:
	case command.ItemSweep:
		for _, k := range it.Keys {
			v := command.SweepVersion(k, &s.on[0].Spans[it.SpanIndex], rev)
			fn(&v)
		}
		return
	case command.ItemLock, command.ItemRelease, command.ItemFence, command.ItemForget, command.ItemAttach, command.ItemDetach:
		return
	}
	if rev == 0 {
		return
	}
	for i := range s.on[0].Writes {
		v := s.on[0].Writes[i].At(rev)
		fn(&v)
	}
}

// ItemBytes implements pipeline.Effect.
func (s *txnCommand) ItemBytes() int {
	if s.item == nil {
		return 0
	}
	return s.size + binary.MaxVarintLen64
}

// AppendItem implements pipeline.Effect.
func (s *txnCommand) AppendItem(dst []byte, id rangeapi.LockID) (_ []byte, hash uint64) {
	s.seal(id)
	from := len(dst)
	dst = command.AppendItem(dst, s.item)
	hash = xxhash.Sum64(dst[from:])
	s.versions(func(v *mvcc.Version) { hash += mvcc.HashWrite(v) })
	return dst, hash
}

// Settle implements pipeline.Effect: a revoke has its revision.
func (s *txnCommand) Settle(_ *pipeline.Call, rev keyspace.Revision) {
	s.answer = &rangeapi.Revoked{Revision: rev}
}

// add puts a command with an item that decides about locks into the batch.
func (s *txnCommand) add(c *pipeline.Call, it *command.TxnItem, on ...*locktable.Held) {
	for _, h := range on {
		h.Deciding = true
	}
	s.item, s.on, s.size = it, on, 64
	if it.Record != nil {
		s.size += it.Record.Bytes()
	}
	for _, k := range it.Keys {
		s.size += len(k) + command.VersionOverheadBytes
	}
	s.r.pipe.Append(c)
}

// say answers a command that found nothing to change, once the leadership is confirmed: an old leader must not answer so.
func (s *txnCommand) say(c *pipeline.Call, a rangeapi.TxnAnswer, out *pipeline.Answers) {
	s.answer = a
	s.r.pipe.Confirm(c, out)
}
