package recovery

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"

	"github.com/skeindb/skein/keyspace"
)

// Format is the version of both files (docs/format/recovery.md).
const Format = 1

// The kinds of files.
const (
	kindCollected = "collected"
	kindPlan      = "plan"
)

// MaxFileBytes bounds a file that is read: about 100,000 groups.
const MaxFileBytes = 256 << 20

// Collected is what one node has.
type Collected struct {
	Format uint64 `json:"format"`
	Kind   string `json:"kind"`
	// Cluster and Node say whose directory it is; Name is the node's, if it knows it; Version is the cluster version in which
	// it is written.
	Cluster id               `json:"cluster"`
	Node    id               `json:"node"`
	Name    string           `json:"name,omitempty"`
	Version keyspace.Version `json:"version"`
	// Interrupted is the plan that was only half applied here.
	Interrupted string `json:"interrupted,omitempty"`
	// Plan is the one that was applied here last. Awaits are its other survivors, as long as the node does not know that all
	// of them have applied it: it has not run since.
	Plan   string `json:"plan,omitempty"`
	Awaits []id   `json:"awaits,omitempty"`
	// Placement is what the node's replica of the placement group says, nil where it has none.
	Placement *Placement `json:"placement,omitempty"`
	// Copies are its replicas, that of placement first.
	Copies []Copy `json:"copies"`
}

// Copy is one node's replica of a group.
type Copy struct {
	// Range is 0 for the placement group.
	Range   keyspace.RangeID   `json:"range"`
	Replica keyspace.ReplicaID `json:"replica"`
	// Unusable says why the copy cannot be used; the rest may be missing then.
	Unusable string `json:"unusable,omitempty"`
	// Made says which split in a tail makes the copy: its own first record is not durable.
	Made *Made `json:"made,omitempty"`
	// Applied is the position of the applied record, Last that of the newest entry. Between them is the
	// tail. Term and Commit are those of the hard state.
	Applied Position `json:"applied"`
	Last    Position `json:"last"`
	Term    uint64   `json:"term"`
	Commit  uint64   `json:"commit"`
	// InForce are the configurations of which each may be in force: the one that is known to be
	// committed, and all behind it in the tail.
	InForce [][]Member `json:"in_force"`
	// End is what the group will be behind its tail.
	End End `json:"end"`
	// Unsettled says that entries which may be committed or not change the members or the span.
	Unsettled bool `json:"unsettled,omitempty"`
	// Tentative says that an entry gave End its generation that may be committed or not. Settled is what the range
	// certainly was before that entry.
	Tentative bool     `json:"tentative,omitempty"`
	Settled   *Settled `json:"settled,omitempty"`
	// Revision is the highest in state and tail, SequencerTerm the highest term of a sequencer there.
	Revision      keyspace.Revision `json:"revision"`
	SequencerTerm uint64            `json:"sequencer_term"`
	// Absorbs are the ranges that the tail absorbs.
	Absorbs []keyspace.RangeID `json:"absorbs,omitempty"`
}

// Settled is the last generation of a range that is certain, and the end of its span then. Its start never changes.
type Settled struct {
	Generation keyspace.Generation `json:"generation"`
	End        key                 `json:"end"`
}

// Made is a split in a tail.
type Made struct {
	// Parent is the range whose tail has the split, at Index.
	Parent keyspace.RangeID `json:"parent"`
	Index  uint64           `json:"index"`
	// Generation is that with which the child begins.
	Generation keyspace.Generation `json:"generation"`
	// Certain says that the split is committed: by the parent's commit index, or because the child has a log.
	Certain bool `json:"certain"`
}

// Position names an entry.
type Position struct {
	Index uint64 `json:"index"`
	Term  uint64 `json:"term"`
}

// after says whether the log that ends at p is newer than one that ends at o, as raft has it.
func (p Position) after(o Position) bool {
	return p.Term > o.Term || p.Term == o.Term && p.Index > o.Index
}

// End is the state of a group behind its tail.
type End struct {
	Generation keyspace.Generation `json:"generation"`
	Start      key                 `json:"start"`
	End        key                 `json:"end"`
	ConfIndex  uint64              `json:"conf_index"`
	Members    []Member            `json:"members"`
	// Merge binds the range, 0 for none.
	Merge uint64 `json:"merge,omitempty"`
}

func (e *End) span() keyspace.Span { return keyspace.Span{Start: e.Start, End: e.End} }

// Placement is what a replica of the placement group says behind its tail.
type Placement struct {
	Ceiling     keyspace.Revision  `json:"ceiling"`
	Compacted   keyspace.Revision  `json:"compacted"`
	NextRange   keyspace.RangeID   `json:"next_range"`
	NextReplica keyspace.ReplicaID `json:"next_replica"`
	Nodes       []NodeRow          `json:"nodes"`
	Ranges      []RangeRow         `json:"ranges"`
}

// NodeRow is a row of the node table.
type NodeRow struct {
	Node  id     `json:"node"`
	Name  string `json:"name"`
	State string `json:"state"`
}

// RangeRow is a row of the map.
type RangeRow struct {
	Range      keyspace.RangeID    `json:"range"`
	Generation keyspace.Generation `json:"generation"`
	Start      key                 `json:"start"`
	End        key                 `json:"end"`
	ConfIndex  uint64              `json:"conf_index"`
	Members    []Member            `json:"members"`
	// New says that the range is made anew, and empty.
	New bool `json:"new,omitempty"`
}

func (r *RangeRow) descriptor() (keyspace.Descriptor, error) {
	rs, err := replicasOf(r.Members)
	return keyspace.Descriptor{
		Range: r.Range, Generation: r.Generation, Span: keyspace.Span{Start: r.Start, End: r.End}, ConfIndex: r.ConfIndex, Replicas: rs,
	}, err
}

// Encode returns the file.
func (c *Collected) Encode() ([]byte, error) {
	c.Format, c.Kind = Format, kindCollected
	return encode(c)
}

// DecodeCollected reads a file of collect.
func DecodeCollected(b []byte) (*Collected, error) {
	c := &Collected{}
	if err := decode(b, kindCollected, c); err != nil {
		return nil, err
	}
	for i := range c.Copies {
		for _, ms := range append(c.Copies[i].InForce, c.Copies[i].End.Members) {
			if _, err := replicasOf(ms); err != nil {
				return nil, fmt.Errorf("recovery: %s on node %s: %w", groupName(c.Copies[i].Range), c.Node.node(), err)
			}
		}
	}
	return c, nil
}

// Encode returns the file. The plan's id is the hash of the rest.
func (p *Plan) Encode() ([]byte, error) {
	p.Format, p.Kind, p.ID = Format, kindPlan, ""
	b, err := encode(p)
	if err != nil {
		return nil, err
	}
	p.ID = fmt.Sprintf("%x", sha256.Sum256(b))[:16]
	return encode(p)
}

// DecodePlan reads a file of plan. A plan that was changed by hand is refused.
func DecodePlan(b []byte) (*Plan, error) {
	p := &Plan{}
	if err := decode(b, kindPlan, p); err != nil {
		return nil, err
	}
	was := p.ID
	if _, err := p.Encode(); err != nil {
		return nil, err
	}
	if p.ID != was {
		return nil, fmt.Errorf("recovery: the plan says that it is plan %q and is plan %s: it was changed; make it anew with skein recover plan", was, p.ID)
	}
	return p, nil
}

func encode(v any) ([]byte, error) {
	b, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		return nil, fmt.Errorf("recovery: %w", err)
	}
	return append(b, '\n'), nil
}

func decode(b []byte, kind string, v any) error {
	if len(b) > MaxFileBytes {
		return fmt.Errorf("recovery: a file of %d bytes, at most %d are read", len(b), MaxFileBytes)
	}
	var head struct {
		Format uint64 `json:"format"`
		Kind   string `json:"kind"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return fmt.Errorf("recovery: not a file of skein recover: %w", err)
	}
	if head.Kind != kind {
		return fmt.Errorf("recovery: a file of kind %q where one of kind %q is needed", head.Kind, kind)
	}
	if err := keyspace.CheckVersion("recovery file", head.Format, Format); err != nil {
		return fmt.Errorf("recovery: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("recovery: file of kind %q: %w", kind, err)
	}
	return nil
}
