package placement

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
)

// requestKind is the kind of a request of method 33; the numbers are on the wire.
type requestKind byte

const (
	requestAllocate requestKind = iota + 1
	requestReport
	requestCompact
	requestMembers
	requestPutNode
	requestStatus
	requestTransfer
	requestPutSetting
	requestSettings
	requestLease
	requestBegin
	requestOperations
	requestSetNodeState
	requestRemoveNode
	requestKeepBorder
	requestRaiseVersion
	requestCredential
	requestChangeAccess
	requestTakenAccess
	requestAwaitAccess
	requestAlarms
	requestPutHold
	requestEndHold
	requestAccessRows
	requestLoad
)

// requestVersion leads every request of method 33. The versions added: 2 a question about
// stopping nodes, 3 requestLease, 4 requestBegin and requestOperations, 5 states and removal
// of nodes, 6 merges, 7 the directories of nodes, 8 requestKeepBorder. Versions 9 and 10 know
// leaving nodes, and others beside them. Version 11 knows no stopping nodes, version 12 the
// cluster version.
const requestVersion = 12

// request is what a Client asks a Service beside revisions and the feed. Which
// fields count depends on Kind.
type request struct {
	Kind requestKind
	// Permit guards what the request commands, see guarded; 0 is nothing.
	Permit keyspace.Permit
	// Count is for requestAllocate.
	Count uint64
	// Descriptors are for requestReport.
	Descriptors []keyspace.Descriptor
	// Revision is for requestCompact.
	Revision keyspace.Revision
	// Linearizable is for requestMembers, requestSettings, requestOperations and
	// requestStatus: the answer must not be older than the request. Without it any replica
	// answers the last three by what it has applied.
	Linearizable bool
	// Node and Change are for requestPutNode.
	Node   fsm.Node
	Change fsm.NodeChange
	// To is for requestTransfer, requestSetNodeState and requestRemoveNode; From and Becomes
	// are the states for requestSetNodeState. Leave says that the node is removed once it holds
	// nothing. Beside are the nodes that are known to leave.
	To            keyspace.NodeID
	From, Becomes fsm.NodeState
	Leave         bool
	Beside        []keyspace.NodeID
	// Name and Value are for requestPutSetting.
	Name  string
	Value []byte
	// Lease is for requestLease.
	Lease leaseRequest
	// Operation is for requestBegin, without its ids.
	Operation fsm.Operation
	// Key is for requestKeepBorder, and for requestAccessRows: the last row that is known.
	Key []byte
	// Version is for requestRaiseVersion.
	Version keyspace.Version
	// User is for requestCredential.
	User string
	// Caller and Access are for requestChangeAccess: who asks for which change.
	Caller string
	Access rights.Change
	// Index is for requestTakenAccess and requestAwaitAccess: which index a node has taken in, or all
	// are to take in.
	Index keyspace.AccessIndex
	// Silence is for requestAwaitAccess: nodes without an answer for longer need not take the index in, because their
	// view lease has run out. 0 is that all nodes must.
	Silence time.Duration
	// Alarm is for requestAlarms. Its Change may be 0: that asks for all alarms.
	Alarm fsm.ChangeAlarm
	// PutHold is for requestPutHold, without a time, and EndHold for requestEndHold.
	PutHold fsm.PutHold
	EndHold fsm.EndHold
	// Load is for requestLoad. Its Step may be 0: that asks how far the load is.
	Load fsm.ChangeLoad
}

// maybeOld says that any replica may answer, by what it has applied.
func (q *request) maybeOld() bool {
	return !q.Linearizable && (q.Kind == requestStatus || q.Kind == requestSettings || q.Kind == requestOperations)
}

// guarded says whether the request commands something that a user can have caused. Who asks for
// anything else needs no right to be told.
func (q *request) guarded() bool {
	switch q.Kind {
	case requestCompact, requestPutNode, requestTransfer, requestPutSetting, requestBegin, requestSetNodeState, requestRemoveNode, requestKeepBorder, requestRaiseVersion, requestChangeAccess,
		requestPutHold, requestEndHold:
		return true
	case requestLease:
		return q.Lease.Op == leaseGrant || q.Lease.Op == leaseRevoke || q.Lease.Op == leaseRevokeChecked
	case requestAlarms:
		return q.Alarm.Change != 0
	case requestLoad:
		return q.Load.Step != 0
	case requestAllocate, requestReport, requestMembers, requestStatus, requestSettings, requestOperations, requestCredential, requestTakenAccess, requestAwaitAccess, requestAccessRows:
	}
	return false
}

// requestPermit in the kind says that a permit follows.
const requestPermit = 1 << 7

func (q *request) encode() []byte {
	dst := []byte{requestVersion, byte(q.Kind)}
	if q.Permit != 0 {
		dst[1] |= requestPermit
		dst = binary.AppendUvarint(dst, uint64(q.Permit))
	}
	switch q.Kind {
	case requestAllocate:
		dst = binary.AppendUvarint(dst, q.Count)
	case requestReport:
		dst = fsm.AppendDescriptors(dst, q.Descriptors)
	case requestCompact:
		dst = fsm.AppendRevision(dst, q.Revision)
	case requestMembers, requestSettings, requestOperations, requestStatus:
		dst = fsm.AppendBool(dst, q.Linearizable)
	case requestPutNode:
		dst = fsm.AppendNode(append(dst, byte(q.Change)), &q.Node)
	case requestTransfer, requestRemoveNode:
		dst = binary.AppendUvarint(dst, uint64(q.To))
	case requestSetNodeState:
		dst = fsm.AppendBool(append(binary.AppendUvarint(dst, uint64(q.To)), byte(q.From), byte(q.Becomes)), q.Leave)
		dst = fsm.AppendNodeIDs(dst, q.Beside)
	case requestPutSetting:
		dst = fsm.AppendBytes(fsm.AppendString(dst, q.Name), q.Value)
	case requestLease:
		dst = q.Lease.append(dst)
	case requestBegin:
		dst = fsm.AppendOperation(dst, &q.Operation)
	case requestKeepBorder, requestAccessRows:
		dst = fsm.AppendBytes(dst, q.Key)
	case requestRaiseVersion:
		dst = binary.AppendUvarint(dst, uint64(q.Version))
	case requestCredential:
		dst = fsm.AppendString(dst, q.User)
	case requestChangeAccess:
		dst = fsm.AppendChange(fsm.AppendString(dst, q.Caller), &q.Access)
	case requestTakenAccess, requestAwaitAccess:
		dst = binary.AppendUvarint(dst, uint64(q.Index))
		if q.Kind == requestAwaitAccess {
			dst = binary.AppendUvarint(dst, uint64(q.Silence))
		}
	case requestAlarms:
		dst = fsm.AppendAlarmChange(dst, q.Alarm)
	case requestPutHold:
		dst = fsm.AppendPutHold(dst, q.PutHold)
	case requestEndHold:
		dst = fsm.AppendEndHold(dst, q.EndHold)
	case requestLoad:
		dst = fsm.AppendChangeLoad(dst, &q.Load)
	default:
		panic(fmt.Sprintf("placement: encode request of kind %d", q.Kind))
	}
	return dst
}

func decodeRequest(p []byte) (request, error) {
	r := fsm.NewReader(p)
	r.VersionIs(requestVersion)
	kind := r.Byte()
	q := request{Kind: requestKind(kind &^ requestPermit)}
	if kind != byte(q.Kind) {
		q.Permit = keyspace.Permit(r.Uvarint())
	}
	switch q.Kind {
	case requestAllocate:
		q.Count = uint64(r.Bounded(fsm.MaxRangeIDs))
	case requestReport:
		q.Descriptors = r.Descriptors(fsm.MaxDescriptors)
	case requestCompact:
		q.Revision = r.Revision()
	case requestMembers, requestSettings, requestOperations, requestStatus:
		q.Linearizable = r.Bool()
	case requestPutNode:
		q.Change, q.Node = r.NodeChange(), r.Node()
	case requestTransfer, requestRemoveNode:
		q.To = keyspace.NodeID(r.Uvarint())
	case requestSetNodeState:
		q.To, q.From, q.Becomes, q.Leave = keyspace.NodeID(r.Uvarint()), r.NodeState(), r.NodeState(), r.Bool()
		q.Beside = r.NodeIDs()
	case requestPutSetting:
		q.Name, q.Value = r.StringUpTo(fsm.MaxNameBytes), r.CopyUpTo(fsm.MaxSettingBytes)
	case requestLease:
		q.Lease = readLeaseRequest(&r)
	case requestBegin:
		q.Operation = r.Operation()
	case requestKeepBorder, requestAccessRows:
		q.Key = r.CopyUpTo(fsm.MaxLeaseSpanBytes)
	case requestRaiseVersion:
		q.Version = r.ClusterVersion()
	case requestCredential:
		q.User = r.StringUpTo(rights.MaxNameBytes)
	case requestChangeAccess:
		q.Caller, q.Access = r.StringUpTo(rights.MaxNameBytes), r.Change()
	case requestTakenAccess, requestAwaitAccess:
		q.Index = keyspace.AccessIndex(r.Uvarint())
		if q.Kind == requestAwaitAccess {
			q.Silence = time.Duration(r.Bounded(math.MaxInt64))
		}
	case requestAlarms:
		q.Alarm = r.AlarmChange()
	case requestPutHold:
		q.PutHold = r.PutHold()
	case requestEndHold:
		q.EndHold = r.EndHold()
	case requestLoad:
		q.Load = r.ChangeLoad()
	default:
		r.Failf("unknown request kind %d", q.Kind)
	}
	if kind != byte(q.Kind) && (q.Permit == 0 || !q.guarded()) {
		r.Failf("a request of kind %d with permit %d", q.Kind, q.Permit)
	}
	if err := r.Finish(); err != nil {
		return request{}, fmt.Errorf("decode placement request: %w", err)
	}
	return q, nil
}

// Status is the placement group's state, which is what etcd's Maintenance.Status
// says of raft.
type Status struct {
	// Leader is the node that etcd clients call the leader; 0 if none is known.
	Leader keyspace.NodeID
	Term   uint64
	// Index is the group's commit index, Applied the last applied one, both where
	// the answer was made.
	Index, Applied uint64
	// Replicas are the group's members, as the node that made the answer has applied them.
	Replicas []keyspace.Replica
	// ConfIndex is the index of the entry that made them the members.
	ConfIndex uint64
}

func appendCredential(dst []byte, c *rights.Credential) []byte {
	dst = fsm.AppendBytes(fsm.AppendBool(dst, c.Enabled), c.Hash)
	for _, n := range []uint64{c.Since, c.Index, c.Revision} {
		dst = binary.AppendUvarint(dst, n)
	}
	return dst
}

func readCredential(r *fsm.Reader) rights.Credential {
	return rights.Credential{Enabled: r.Bool(), Hash: r.CopyUpTo(rights.MaxHashBytes), Since: r.Uvarint(), Index: r.Uvarint(), Revision: r.Uvarint()}
}

// response is the answer to a request. Which fields count depends on the kind of
// the request.
type response struct {
	// First is the first of the allocated range ids.
	First keyspace.RangeID
	// Held are the reported descriptors that do not fit into the map yet.
	Held []keyspace.Descriptor
	// Revision is the current revision (requestCompact), or that of the settings
	// (requestSettings).
	Revision keyspace.Revision
	Nodes    []fsm.Node
	Status   Status
	Settings []fsm.Setting
	Lease    leaseResponse
	// Operations are those under way, or the one that was begun.
	Operations []fsm.Operation
	// Credential is what proves that somebody is the user.
	Credential rights.Credential
	// Index is the access index that nodes have to have before a change is acknowledged, 0 for none
	// (requestChangeAccess, requestLoad), or the present one (requestTakenAccess).
	Index keyspace.AccessIndex
	// Lacking are the nodes that have not said that they have taken an index in.
	Lacking []keyspace.NodeID
	// Alarms are all alarms, or those that were raised or ended. A map of MapVersion has what they say.
	Alarms     []fsm.Alarm
	MapVersion uint64
	// Hold is what requestPutHold has made or renewed. A map of MapVersion has it.
	Hold fsm.Hold
	// AccessRows are those behind Key, as of the change of index MapVersion; More says that there are others.
	AccessRows []fsm.AccessRow
	More       bool
	// Loading is the load of the cluster, nil if there was none.
	Loading *fsm.Loading
}

func (a *response) encode(kind requestKind) []byte {
	dst := []byte{fsm.FormatVersion, fsm.AnswerOK}
	switch kind {
	case requestStatus:
		dst = binary.AppendUvarint(dst, uint64(a.Status.Leader))
		dst = binary.AppendUvarint(dst, a.Status.Term)
		dst = binary.AppendUvarint(dst, a.Status.Index)
		dst = binary.AppendUvarint(dst, a.Status.Applied)
		dst = keyspace.AppendReplicas(dst, a.Status.Replicas)
		dst = binary.AppendUvarint(dst, a.Status.ConfIndex)
	case requestAllocate:
		dst = binary.AppendUvarint(dst, uint64(a.First))
	case requestReport:
		dst = fsm.AppendDescriptors(dst, a.Held)
	case requestCompact:
		dst = fsm.AppendRevision(dst, a.Revision)
	case requestMembers:
		dst = fsm.AppendNodes(dst, a.Nodes)
	case requestSettings:
		dst = fsm.AppendRevision(dst, a.Revision)
		dst = binary.AppendUvarint(dst, uint64(len(a.Settings)))
		for i := range a.Settings {
			dst = fsm.AppendBytes(fsm.AppendString(dst, a.Settings[i].Name), a.Settings[i].Value)
		}
	case requestCredential:
		dst = appendCredential(dst, &a.Credential)
	case requestAlarms:
		dst = fsm.AppendAlarms(binary.AppendUvarint(dst, a.MapVersion), a.Alarms)
	case requestPutHold:
		dst = fsm.AppendHolds(binary.AppendUvarint(dst, a.MapVersion), []fsm.Hold{a.Hold})
	case requestAccessRows:
		dst = fsm.AppendAccessRows(fsm.AppendBool(binary.AppendUvarint(dst, a.MapVersion), a.More), a.AccessRows)
	case requestLoad:
		dst = binary.AppendUvarint(binary.AppendUvarint(dst, a.MapVersion), uint64(a.Index))
		dst = fsm.AppendBool(dst, a.Loading != nil)
		if a.Loading != nil {
			dst = fsm.AppendLoading(dst, a.Loading)
		}
	case requestLease:
		dst = a.Lease.append(dst)
	case requestBegin, requestOperations:
		dst = binary.AppendUvarint(dst, uint64(len(a.Operations)))
		for i := range a.Operations {
			dst = fsm.AppendOperation(dst, &a.Operations[i])
		}
	case requestChangeAccess, requestTakenAccess:
		dst = binary.AppendUvarint(dst, uint64(a.Index))
	case requestAwaitAccess:
		dst = fsm.AppendNodeIDs(dst, a.Lacking)
	case requestPutNode, requestTransfer, requestPutSetting, requestSetNodeState, requestRemoveNode, requestKeepBorder, requestRaiseVersion,
		requestEndHold:
	default:
		panic(fmt.Sprintf("placement: encode answer to a request of kind %d", kind))
	}
	return dst
}

func decodeResponse(kind requestKind, p []byte) (response, error) {
	r, err := fsm.AnswerBody(p)
	if err != nil {
		return response{}, err
	}
	var a response
	switch kind {
	case requestStatus:
		a.Status = Status{Leader: keyspace.NodeID(r.Uvarint()), Term: r.Uvarint(), Index: r.Uvarint(), Applied: r.Uvarint(), Replicas: r.Replicas(), ConfIndex: r.Uvarint()}
	case requestAllocate:
		a.First = keyspace.RangeID(r.Uvarint())
	case requestReport:
		a.Held = r.Descriptors(fsm.MaxDescriptors)
	case requestCompact:
		a.Revision = r.Revision()
	case requestMembers:
		a.Nodes = r.Nodes()
	case requestSettings:
		a.Revision = r.Revision()
		n := r.CountUpTo(fsm.MaxSettings, 2)
		for range n {
			a.Settings = append(a.Settings, fsm.Setting{Name: r.StringUpTo(fsm.MaxNameBytes), Value: r.CopyUpTo(fsm.MaxSettingBytes)})
		}
	case requestCredential:
		a.Credential = readCredential(r)
	case requestAlarms:
		a.MapVersion, a.Alarms = r.Uvarint(), r.Alarms()
	case requestPutHold:
		a.MapVersion = r.Uvarint()
		if all := r.Holds(); len(all) == 1 {
			a.Hold = all[0]
		} else {
			r.Failf("%d holds in the answer to one", len(all))
		}
	case requestAccessRows:
		a.MapVersion, a.More, a.AccessRows = r.Uvarint(), r.Bool(), r.AccessRows()
	case requestLoad:
		a.MapVersion, a.Index = r.Uvarint(), keyspace.AccessIndex(r.Uvarint())
		if r.Bool() {
			l := r.Loading()
			a.Loading = &l
		}
	case requestLease:
		a.Lease = readLeaseResponse(r)
	case requestBegin, requestOperations:
		n := r.CountUpTo(fsm.MaxOperations, 7)
		for range n {
			a.Operations = append(a.Operations, r.Operation())
		}
	case requestChangeAccess, requestTakenAccess:
		a.Index = keyspace.AccessIndex(r.Uvarint())
	case requestAwaitAccess:
		a.Lacking = r.NodeIDs()
	case requestPutNode, requestTransfer, requestPutSetting, requestSetNodeState, requestRemoveNode, requestKeepBorder, requestRaiseVersion,
		requestEndHold:
	}
	if err := r.Finish(); err != nil {
		return response{}, fmt.Errorf("decode answer to a placement request of kind %d: %w", kind, err)
	}
	return a, nil
}
