package placement

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// opKind is the kind of a command's effect; the numbers are stored.
type opKind byte

const (
	opRaiseCeiling opKind = iota + 1
	opLowerCeiling
	opCompact
	opAllocate
	opReport
	opPutNode
	opMarkCreated
	opPutSetting
	opGrantLease
	opRegisterLease
	opRevokeLeases
	opRemoveLeases
	opBeginOperation
	opEndOperation
	opSetNodeState
	opRemoveNode
	opAlignMerge
	opCommitMerge
	opAbortMerge
	opKeepBorder
	opBindMerge
)

// command is one raft entry of the placement group.
type command struct {
	// Term is the raft term in which the command was proposed. An entry whose own
	// term differs is a no-op.
	Term uint64
	// Boot and Number name the proposer's waiter: the process and a counter in it.
	Boot   keyspace.BootID
	Number uint64
	Op     effect
}

// effect is what a command does. Its fields are all that apply may look at
// beside the state itself: no clock, no setting of the node.
type effect interface {
	kind() opKind
	append(dst []byte) []byte
}

// raiseCeiling allows revisions up to To to be handed out in the command's term.
type raiseCeiling struct{ To keyspace.Revision }

// lowerCeiling says that in the command's term nothing above To was handed out
// nor will be, until the ceiling is raised again.
type lowerCeiling struct{ To keyspace.Revision }

// compact raises the compacted revision to At.
type compact struct{ At keyspace.Revision }

// allocate takes Count range ids that are never given to anybody else.
type allocate struct{ Count uint64 }

// report brings newer descriptors into the range map.
type report struct{ Descriptors []keyspace.Descriptor }

// markCreated says that every replica of the ranges exists on its node.
type markCreated struct{ Ranges []keyspace.RangeID }

// putSetting writes a setting, or removes it where Value is empty.
type putSetting struct {
	Name  string
	Value []byte
}

// keepBorder has the range that begins at Key stay one, whatever it holds, until it is
// merged by command.
type keepBorder struct{ Key []byte }

func (keepBorder) kind() opKind   { return opKeepBorder }
func (raiseCeiling) kind() opKind { return opRaiseCeiling }
func (lowerCeiling) kind() opKind { return opLowerCeiling }
func (compact) kind() opKind      { return opCompact }
func (allocate) kind() opKind     { return opAllocate }
func (report) kind() opKind       { return opReport }
func (markCreated) kind() opKind  { return opMarkCreated }
func (putSetting) kind() opKind   { return opPutSetting }

func (o raiseCeiling) append(dst []byte) []byte { return appendRevision(dst, o.To) }
func (o lowerCeiling) append(dst []byte) []byte { return appendRevision(dst, o.To) }
func (o compact) append(dst []byte) []byte      { return appendRevision(dst, o.At) }
func (o allocate) append(dst []byte) []byte     { return binary.AppendUvarint(dst, o.Count) }
func (o report) append(dst []byte) []byte       { return appendDescriptors(dst, o.Descriptors) }
func (o keepBorder) append(dst []byte) []byte   { return appendBytes(dst, o.Key) }
func (o putSetting) append(dst []byte) []byte {
	return appendBytes(appendString(dst, o.Name), o.Value)
}

func (o markCreated) append(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(o.Ranges)))
	for _, id := range o.Ranges {
		dst = binary.AppendUvarint(dst, uint64(id))
	}
	return dst
}

// encode returns the command's bytes for the log.
func (c *command) encode() []byte {
	dst := []byte{formatVersion, byte(c.Op.kind())}
	dst = binary.AppendUvarint(dst, c.Term)
	dst = binary.BigEndian.AppendUint64(dst, uint64(c.Boot))
	dst = binary.AppendUvarint(dst, c.Number)
	return c.Op.append(dst)
}

// decodeCommand reads what encode wrote. It copies what it keeps of b.
func decodeCommand(b []byte) (command, error) {
	r := reader{wire.NewReader(b)}
	r.version()
	kind := opKind(r.Byte())
	c := command{Term: r.Uvarint(), Boot: keyspace.BootID(r.Uint64BE()), Number: r.Uvarint()}
	c.Op = r.effect(kind)
	if err := r.end(); err != nil {
		return command{}, fmt.Errorf("decode placement command of kind %d: %w", kind, err)
	}
	return c, nil
}

func (r *reader) effect(kind opKind) effect {
	switch kind {
	case opRaiseCeiling:
		return raiseCeiling{To: r.revision()}
	case opLowerCeiling:
		return lowerCeiling{To: r.revision()}
	case opCompact:
		return compact{At: r.revision()}
	case opAllocate:
		return allocate{Count: uint64(r.bounded(maxRangeIDs))}
	case opReport:
		return report{Descriptors: r.descriptors(maxDescriptors)}
	case opPutNode:
		return putNode{Change: r.nodeChange(), Now: r.millis(), Node: r.node()}
	case opMarkCreated:
		n := r.count(maxRangeIDs, 1)
		o := markCreated{}
		for range n {
			o.Ranges = append(o.Ranges, keyspace.RangeID(r.Uvarint()))
		}
		return o
	case opPutSetting:
		return putSetting{Name: r.string(maxNameBytes), Value: r.bytes(maxSettingBytes)}
	case opGrantLease:
		return grantLease{ID: r.leaseID(), TTL: r.leaseTTL()}
	case opRegisterLease:
		return registerLease{ID: r.leaseID(), Span: r.span()}
	case opRevokeLeases:
		return revokeLeases{Leases: r.leaseRefs()}
	case opRemoveLeases:
		return removeLeases{Leases: r.leaseRefs()}
	case opBeginOperation:
		return beginOperation{Generation: keyspace.Generation(r.Uvarint()), ConfIndex: r.Uvarint(), Right: r.rangeVersion(), Operation: r.operation()}
	case opEndOperation:
		return endOperation{Range: keyspace.RangeID(r.Uvarint()), ID: r.Uvarint()}
	case opSetNodeState:
		return setNodeState{Node: keyspace.NodeID(r.Uvarint()), From: r.nodeState(), To: r.nodeState(), Leave: r.Bool(), Beside: r.nodeIDs(), Now: r.millis()}
	case opRemoveNode:
		return removeNode{Node: keyspace.NodeID(r.Uvarint()), Now: r.millis()}
	case opAlignMerge:
		return alignMerge{Merge: r.mergeRef(), From: keyspace.NodeID(r.Uvarint()), To: keyspace.NodeID(r.Uvarint())}
	case opCommitMerge:
		return commitMerge{Merge: r.mergeRef(), Left: r.rangeVersion(), Right: r.rangeVersion()}
	case opAbortMerge:
		return abortMerge{Merge: r.mergeRef()}
	case opKeepBorder:
		return keepBorder{Key: r.bytes(maxLeaseSpanBytes)}
	case opBindMerge:
		return bindMerge{Merge: r.mergeRef()}
	}
	r.Failf("unknown command kind %d", kind)
	return nil
}

// bounded reads a number that is no count of what follows, but bounded like one.
func (r *reader) bounded(limit int) int {
	n := r.Uvarint()
	if n > uint64(limit) {
		r.Failf("%d asked for, at most %d", n, limit)
		return 0
	}
	return int(n)
}
