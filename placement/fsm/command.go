package fsm

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rights"
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
	opRaiseVersion
	opChangeAccess
	opChangeAlarm
	opGuarded
	opRevokeChecked
	opKeepLease
	opPutHold
	opEndHold
	opChangeLoad
	opGrantLeaseIn
	opRegisterLeases
)

// Command is one raft entry of the placement group.
type Command struct {
	// Term is the raft term in which the command was proposed. An entry whose own
	// term differs is a no-op.
	Term uint64
	// Boot and Number name the proposer's waiter: the process and a counter in it.
	Boot   keyspace.BootID
	Number uint64
	Op     Effect
}

// Effect is what a command does. Its fields are all that apply may look at
// beside the state itself: no clock, no setting of the node.
type Effect interface {
	kind() opKind
	append(dst []byte) []byte
}

// RaiseCeiling allows revisions up to To to be allocated in the command's term.
type RaiseCeiling struct{ To keyspace.Revision }

// LowerCeiling says that in the command's term nothing above To was allocated
// nor will be, until the ceiling is raised again.
type LowerCeiling struct{ To keyspace.Revision }

// Compact raises the compacted revision to At.
type Compact struct{ At keyspace.Revision }

// AllocateRanges takes Count range ids that are never given to anybody else.
type AllocateRanges struct{ Count uint64 }

// Report brings newer descriptors into the range map.
type Report struct{ Descriptors []keyspace.Descriptor }

// MarkCreated says that every replica of the ranges exists on its node.
type MarkCreated struct{ Ranges []keyspace.RangeID }

// PutSetting writes a setting, or removes it where Value is empty.
type PutSetting struct {
	Name  string
	Value []byte
}

// KeepBorder has the range that begins at Key stay one, whatever it holds, until it is
// merged by command.
type KeepBorder struct{ Key []byte }

// Guarded is a command that a user has caused, who was permitted it. Once that permit has ended the
// command does nothing. It is written from keyspace.VersionAccess on.
type Guarded struct {
	// Permit is not 0.
	Permit keyspace.Permit
	// Op is not guarded itself.
	Op Effect
}

func (Guarded) kind() opKind        { return opGuarded }
func (KeepBorder) kind() opKind     { return opKeepBorder }
func (RaiseCeiling) kind() opKind   { return opRaiseCeiling }
func (LowerCeiling) kind() opKind   { return opLowerCeiling }
func (Compact) kind() opKind        { return opCompact }
func (AllocateRanges) kind() opKind { return opAllocate }
func (Report) kind() opKind         { return opReport }
func (MarkCreated) kind() opKind    { return opMarkCreated }
func (PutSetting) kind() opKind     { return opPutSetting }

func (o RaiseCeiling) append(dst []byte) []byte   { return AppendRevision(dst, o.To) }
func (o LowerCeiling) append(dst []byte) []byte   { return AppendRevision(dst, o.To) }
func (o Compact) append(dst []byte) []byte        { return AppendRevision(dst, o.At) }
func (o AllocateRanges) append(dst []byte) []byte { return binary.AppendUvarint(dst, o.Count) }
func (o Report) append(dst []byte) []byte         { return AppendDescriptors(dst, o.Descriptors) }
func (o KeepBorder) append(dst []byte) []byte     { return AppendBytes(dst, o.Key) }

func (o PutSetting) append(dst []byte) []byte {
	return AppendBytes(AppendString(dst, o.Name), o.Value)
}

func (o Guarded) append(dst []byte) []byte {
	return o.Op.append(append(binary.AppendUvarint(dst, uint64(o.Permit)), byte(o.Op.kind())))
}

func (o MarkCreated) append(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(o.Ranges)))
	for _, id := range o.Ranges {
		dst = binary.AppendUvarint(dst, uint64(id))
	}
	return dst
}

// Encode returns the command's bytes for the log.
func (c *Command) Encode() []byte {
	dst := []byte{FormatVersion, byte(c.Op.kind())}
	dst = binary.AppendUvarint(dst, c.Term)
	dst = binary.BigEndian.AppendUint64(dst, uint64(c.Boot))
	dst = binary.AppendUvarint(dst, c.Number)
	return c.Op.append(dst)
}

// DecodeCommand reads what encode wrote. It copies what it keeps of b.
func DecodeCommand(b []byte) (Command, error) {
	r := NewReader(b)
	r.Version()
	kind := opKind(r.Byte())
	c := Command{Term: r.Uvarint(), Boot: keyspace.BootID(r.Uint64BE()), Number: r.Uvarint()}
	c.Op = r.effect(kind)
	if err := r.Finish(); err != nil {
		return Command{}, fmt.Errorf("decode placement command of kind %d: %w", kind, err)
	}
	return c, nil
}

func (r *Reader) effect(kind opKind) Effect {
	switch kind {
	case opRaiseCeiling:
		return RaiseCeiling{To: r.Revision()}
	case opLowerCeiling:
		return LowerCeiling{To: r.Revision()}
	case opCompact:
		return Compact{At: r.Revision()}
	case opAllocate:
		return AllocateRanges{Count: uint64(r.Bounded(MaxRangeIDs))}
	case opReport:
		return Report{Descriptors: r.Descriptors(MaxDescriptors)}
	case opPutNode:
		return PutNode{Change: r.NodeChange(), Now: r.millis(), Node: r.Node()}
	case opMarkCreated:
		o := MarkCreated{}
		for range r.CountUpTo(MaxRangeIDs, 1) {
			o.Ranges = append(o.Ranges, keyspace.RangeID(r.Uvarint()))
		}
		return o
	case opPutSetting:
		return PutSetting{Name: r.StringUpTo(MaxNameBytes), Value: r.CopyUpTo(MaxSettingBytes)}
	case opGrantLease, opGrantLeaseIn, opRegisterLease, opRegisterLeases, opRevokeLeases, opRemoveLeases:
		return r.leaseEffect(kind)
	case opRevokeChecked, opKeepLease:
		return r.checkedEnd(kind)
	case opBeginOperation:
		return BeginOperation{Generation: keyspace.Generation(r.Uvarint()), ConfIndex: r.Uvarint(), Right: r.rangeVersion(), Operation: r.Operation()}
	case opEndOperation:
		return EndOperation{Range: keyspace.RangeID(r.Uvarint()), ID: r.Uvarint()}
	case opSetNodeState:
		return SetNodeState{Node: keyspace.NodeID(r.Uvarint()), From: r.NodeState(), To: r.NodeState(), Leave: r.Bool(), Beside: r.NodeIDs(), Now: r.millis()}
	case opRemoveNode:
		return RemoveNode{Node: keyspace.NodeID(r.Uvarint()), Now: r.millis()}
	case opAlignMerge, opCommitMerge, opAbortMerge:
		return r.mergeEffect(kind)
	case opKeepBorder:
		return KeepBorder{Key: r.CopyUpTo(MaxLeaseSpanBytes)}
	case opBindMerge:
		return BindMerge{Merge: r.mergeRef()}
	case opRaiseVersion:
		return RaiseVersion{To: r.ClusterVersion()}
	case opChangeAccess:
		return ChangeAccess{Caller: r.StringUpTo(rights.MaxNameBytes), Change: r.Change(), Key: r.CopyUpTo(MaxKeyBytes)}
	case opChangeAlarm:
		return r.alarmCommand()
	case opPutHold:
		return r.PutHold()
	case opEndHold:
		return r.EndHold()
	case opChangeLoad:
		return r.stepOfLoad()
	case opGuarded:
		o, guarded := Guarded{Permit: keyspace.Permit(r.Uvarint())}, opKind(r.Byte())
		if o.Permit == 0 || guarded == opGuarded {
			r.Failf("a command of kind %d guarded by permit %d", guarded, o.Permit)
			return nil
		}
		o.Op = r.effect(guarded)
		return o
	}
	r.Failf("unknown command kind %d", kind)
	return nil
}

// leaseEffect reads a change of leases.
func (r *Reader) leaseEffect(kind opKind) Effect {
	switch kind {
	case opGrantLease:
		return GrantLease{ID: r.LeaseID(), TTL: r.LeaseTTL()}
	case opGrantLeaseIn:
		return GrantLeaseIn{ID: r.LeaseID(), TTL: r.LeaseTTL(), Span: r.Span()}
	case opRegisterLease:
		return RegisterLease{ID: r.LeaseID(), Span: r.Span()}
	case opRegisterLeases:
		return RegisterLeases{Leases: r.Registrations()}
	case opRevokeLeases:
		return RevokeLeases{Leases: r.leaseRefs()}
	default:
		return RemoveLeases{Leases: r.leaseRefs()}
	}
}

func (r *Reader) alarmCommand() ChangeAlarm {
	o := r.AlarmChange()
	if r.OK() && o.Change == 0 {
		r.Failf("a change of an alarm that changes nothing")
	}
	return o
}

// mergeEffect reads a step of a merge.
func (r *Reader) mergeEffect(kind opKind) Effect {
	m := r.mergeRef()
	if kind == opAlignMerge {
		return AlignMerge{Merge: m, From: keyspace.NodeID(r.Uvarint()), To: keyspace.NodeID(r.Uvarint())}
	}
	if kind == opCommitMerge {
		return CommitMerge{Merge: m, Left: r.rangeVersion(), Right: r.rangeVersion()}
	}
	return AbortMerge{Merge: m}
}
