package command

import (
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// Describe prints an entry of a range's log that has the term, for stories, logs and whoever
// looks at a log. Of bytes that are no entry it says "broken" and why.
func Describe(term uint64, data []byte) string {
	h, body, err := DecodeHeader(data)
	if err != nil {
		return "broken: " + err.Error()
	}
	s := fmt.Sprintf("term=%d %s", term, h.Kind)
	if h.Term != term {
		s += fmt.Sprintf(" made in term %d", h.Term)
	}
	switch h.Kind {
	case KindBatch:
		c, rest, err := DecodeBatchHeader(body)
		if err != nil {
			return "broken: " + err.Error()
		}
		s += fmt.Sprintf(" %d on %d/%d", c.Number, c.Prev.Term, c.Prev.Number)
		items, err := VisitBatch(&c, rest, func(_ int, v *mvcc.Version, before Prior) error {
			s += describeVersion(v, before)
			return nil
		})
		if err != nil {
			return "broken: " + err.Error()
		}
		in := NewCursor(items)
		for in.Len() > 0 {
			it := in.Item()
			s += " " + describeItem(&it)
		}
		if in.Err() != nil {
			return "broken: " + in.Err().Error()
		}
	case KindBind, KindFreeze, KindAbsorb, KindRelease:
		c, err := DecodeMergeCommand(h.Kind, body)
		if err != nil {
			return "broken: " + err.Error()
		}
		s += fmt.Sprintf(" for merge %d", c.ID)
		if c.Other != 0 {
			s += fmt.Sprintf(" with range %s", c.Other)
		}
	case KindSplit:
		c, err := DecodeSplit(body)
		if err != nil {
			return "broken: " + err.Error()
		}
		s += fmt.Sprintf(" at %s into %s", c.Key, c.Child)
	case KindCompact, KindCount:
		n, err := DecodeNumber(body)
		if err != nil {
			return "broken: " + err.Error()
		}
		s += fmt.Sprintf(" %d", n)
	case KindLoad:
		text, err := describeLoad(body)
		if err != nil {
			return "broken: " + err.Error()
		}
		s += text
	}
	return s
}

func describeVersion(v *mvcc.Version, before Prior) string {
	s := fmt.Sprintf(" %s@%d", v.Key, v.Mod)
	if v.Tombstone {
		s += "†"
	} else {
		s += fmt.Sprintf("=%s(create=%d version=%d)", v.Value, v.Create, v.Version)
	}
	if v.Lease != 0 {
		s += fmt.Sprintf(" lease=%d", v.Lease)
	}
	if before.Lease != 0 {
		s += fmt.Sprintf(" was=%d", before.Lease)
	}
	if before.Replaced {
		s += " replaced"
	}
	return s
}

func describeLoad(body []byte) (s string, err error) {
	c, versions, err := DecodeLoad(body)
	if err != nil {
		return "", err
	}
	s = fmt.Sprintf(" %s on %s", c.Stage, &c.From)
	if c.Stage == rangeapi.LoadEnded {
		s += fmt.Sprintf(" to %d compacted=%d", c.Revision, c.Compacted)
	}
	if len(c.Unused) > 0 {
		s += fmt.Sprintf(" unused=%d", c.Unused)
	}
	err = VisitLoad(&c, versions, func(v *mvcc.Version, before LoadPrior) error {
		s += fmt.Sprintf(" %s@%d", v.Key, v.Mod)
		if v.Tombstone {
			s += "†"
		}
		for _, f := range []struct {
			is   bool
			name string
		}{{before.Lived, "lived"}, {before.Old, "old"}, {before.Attach, "attached"}, {v.Earlier != nil, "twice"}} {
			if f.is {
				s += " " + f.name
			}
		}
		if before.Lease != 0 {
			s += fmt.Sprintf(" was=%d", before.Lease)
		}
		return nil
	})
	return s, err
}

func describeItem(it *TxnItem) string {
	s := it.Kind.String()
	switch it.Kind {
	case ItemLock:
		s += fmt.Sprintf(" %s floor=%d", it.Lock.Name, it.Lock.Floor)
		for _, p := range it.Lock.Spans {
			s += " " + [...]string{"r", "w", "sweep"}[p.Mode] + DescribeSpan(p.Span)
		}
		for i := range it.Lock.Writes {
			s += " " + describeIntent(&it.Lock.Writes[i])
		}
		if it.Lock.Revoke.Lease != 0 {
			s += fmt.Sprintf(" revoke=%d/%d", it.Lock.Revoke.Lease, it.Lock.Revoke.Incarnation)
		}
	case ItemAttach, ItemDetach:
		s += fmt.Sprintf(" %d/%d", it.Attachment.Lease, it.Attachment.Incarnation)
	case ItemRelease:
		s += " " + it.ID.String()
	case ItemResolve:
		s += fmt.Sprintf(" %s@%d", it.ID, it.Revision)
	case ItemCommit:
		s += fmt.Sprintf(" %s@%d %s of %d", it.Record.Name, it.Record.Revision, it.ID, len(it.Record.Locks))
	case ItemFence:
		s += fmt.Sprintf(" %d %v", it.Fence, it.IDs)
	case ItemForget:
		s += " " + it.Name.String()
	case ItemSweep:
		s += fmt.Sprintf(" %s@%d span %d: %q to %q", it.ID, it.Revision, it.SpanIndex, it.Keys, it.Next)
	}
	return s
}

// DescribeSpan returns a span as Describe prints it: (key) for one key, [start,end) for others.
func DescribeSpan(s keyspace.Span) string {
	if s.IsSingle() {
		return fmt.Sprintf("(%s)", s.Start)
	}
	return fmt.Sprintf("[%s,%s)", s.Start, s.End)
}

func describeIntent(i *Intent) string {
	lived := ""
	switch {
	case i.Before.Lived:
		lived = " lived"
	case i.Before.Replaced:
		lived = " replaced"
	}
	if i.V.Lease != 0 {
		lived += fmt.Sprintf(" lease=%d", i.V.Lease)
	}
	if i.Before.Lease != 0 && i.Before.Lease != i.V.Lease {
		lived += fmt.Sprintf(" was=%d", i.Before.Lease)
	}
	if i.V.Tombstone {
		return fmt.Sprintf("%s†.%d%s", i.V.Key, i.V.Sub, lived)
	}
	return fmt.Sprintf("%s=%s.%d(create=%d version=%d)%s", i.V.Key, i.V.Value, i.V.Sub, i.V.Create, i.V.Version, lived)
}
