package placement

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
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
	requestStop
	requestTransfer
	requestPutSetting
	requestSettings
	requestStanding
	requestLease
	requestBegin
	requestOperations
	requestSetNodeState
	requestRemoveNode
	requestKeepBorder
)

// requestVersion leads every request of method 33. Version 2 knows requestStanding
// and stopLeaving, and no stopClosing; version 3 knows requestLease; version 4
// requestBegin and requestOperations; version 5 requestSetNodeState, requestRemoveNode,
// more of nodes, and who holds the placement group; version 6 merges; version 7 the
// directories of nodes; version 8 requestKeepBorder; version 9 nodes that leave; version 10
// beside which others they do.
const requestVersion = 10

// request is what a Client asks a Service beside revisions and the feed. Which
// fields count depends on Kind.
type request struct {
	Kind requestKind
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
	Node   Node
	Change nodeChange
	// Boot is for requestPutNode and requestStop; Phase for the latter.
	Boot  keyspace.BootID
	Phase stopPhase
	// To is for requestTransfer, requestSetNodeState and requestRemoveNode; From and
	// Becomes are the states for requestSetNodeState, Leave says that the node is removed
	// once it holds nothing, and Beside are the nodes of which it is known that they leave.
	To            keyspace.NodeID
	From, Becomes NodeState
	Leave         bool
	Beside        []keyspace.NodeID
	// Name and Value are for requestPutSetting.
	Name  string
	Value []byte
	// Lease is for requestLease.
	Lease leaseRequest
	// Operation is for requestBegin, without its ids.
	Operation Operation
	// Key is for requestKeepBorder.
	Key []byte
}

// maybeOld says that any replica may answer, by what it has applied.
func (q *request) maybeOld() bool {
	return !q.Linearizable && (q.Kind == requestStatus || q.Kind == requestSettings || q.Kind == requestOperations)
}

func (q *request) encode() []byte {
	dst := []byte{requestVersion, byte(q.Kind)}
	switch q.Kind {
	case requestStanding:
	case requestAllocate:
		dst = binary.AppendUvarint(dst, q.Count)
	case requestReport:
		dst = appendDescriptors(dst, q.Descriptors)
	case requestCompact:
		dst = appendRevision(dst, q.Revision)
	case requestMembers, requestSettings, requestOperations, requestStatus:
		dst = appendBool(dst, q.Linearizable)
	case requestPutNode:
		dst = binary.BigEndian.AppendUint64(dst, uint64(q.Boot))
		dst = appendNode(append(dst, byte(q.Change)), &q.Node)
	case requestStop:
		dst = binary.BigEndian.AppendUint64(dst, uint64(q.Boot))
		dst = append(dst, byte(q.Phase))
	case requestTransfer, requestRemoveNode:
		dst = binary.AppendUvarint(dst, uint64(q.To))
	case requestSetNodeState:
		dst = appendBool(append(binary.AppendUvarint(dst, uint64(q.To)), byte(q.From), byte(q.Becomes)), q.Leave)
		dst = appendNodeIDs(dst, q.Beside)
	case requestPutSetting:
		dst = appendBytes(appendString(dst, q.Name), q.Value)
	case requestLease:
		dst = q.Lease.append(dst)
	case requestBegin:
		dst = appendOperation(dst, &q.Operation)
	case requestKeepBorder:
		dst = appendBytes(dst, q.Key)
	default:
		panic(fmt.Sprintf("placement: encode request of kind %d", q.Kind))
	}
	return dst
}

func decodeRequest(p []byte) (request, error) {
	r := reader{wire.NewReader(p)}
	r.versionIs(requestVersion)
	q := request{Kind: requestKind(r.Byte())}
	switch q.Kind {
	case requestStanding:
	case requestAllocate:
		q.Count = uint64(r.bounded(maxRangeIDs))
	case requestReport:
		q.Descriptors = r.descriptors(maxDescriptors)
	case requestCompact:
		q.Revision = r.revision()
	case requestMembers, requestSettings, requestOperations, requestStatus:
		q.Linearizable = r.Bool()
	case requestPutNode:
		q.Boot = keyspace.BootID(r.Uint64BE())
		q.Change, q.Node = r.nodeChange(), r.node()
	case requestStop:
		q.Boot = keyspace.BootID(r.Uint64BE())
		q.Phase = stopPhase(r.Byte())
		if q.Phase != stopClosed && q.Phase != stopLeaving {
			r.Failf("stop phase %d", q.Phase)
		}
	case requestTransfer, requestRemoveNode:
		q.To = keyspace.NodeID(r.Uvarint())
	case requestSetNodeState:
		q.To, q.From, q.Becomes, q.Leave = keyspace.NodeID(r.Uvarint()), r.nodeState(), r.nodeState(), r.Bool()
		q.Beside = r.nodeIDs()
	case requestPutSetting:
		q.Name, q.Value = r.string(maxNameBytes), r.bytes(maxSettingBytes)
	case requestLease:
		q.Lease = r.leaseRequest()
	case requestBegin:
		q.Operation = r.operation()
	case requestKeepBorder:
		q.Key = r.bytes(maxLeaseSpanBytes)
	default:
		r.Failf("unknown request kind %d", q.Kind)
	}
	if err := r.end(); err != nil {
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

// Setting is one of the cluster's settings.
type Setting struct {
	Name  string
	Value []byte
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
	Nodes    []Node
	Status   Status
	Verdict  verdict
	Settings []Setting
	// Standing is the answer to requestStanding.
	Standing standing
	Lease    leaseResponse
	// Operations are those under way, or the one that was begun.
	Operations []Operation
}

// maxNodes and maxSettings bound what an answer holds.
const (
	maxNodes    = 1 << 14
	maxSettings = 1 << 14
)

func (a *response) encode(kind requestKind) []byte {
	dst := []byte{formatVersion, answerOK}
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
		dst = appendDescriptors(dst, a.Held)
	case requestCompact:
		dst = appendRevision(dst, a.Revision)
	case requestMembers:
		dst = appendNodes(dst, a.Nodes)
	case requestStop:
		dst = append(dst, byte(a.Verdict))
	case requestStanding:
		dst = binary.BigEndian.AppendUint64(dst, uint64(a.Standing.boot))
		dst = append(dst, byte(a.Standing.phase))
	case requestSettings:
		dst = appendRevision(dst, a.Revision)
		dst = binary.AppendUvarint(dst, uint64(len(a.Settings)))
		for i := range a.Settings {
			dst = appendBytes(appendString(dst, a.Settings[i].Name), a.Settings[i].Value)
		}
	case requestLease:
		dst = a.Lease.append(dst)
	case requestBegin, requestOperations:
		dst = binary.AppendUvarint(dst, uint64(len(a.Operations)))
		for i := range a.Operations {
			dst = appendOperation(dst, &a.Operations[i])
		}
	case requestPutNode, requestTransfer, requestPutSetting, requestSetNodeState, requestRemoveNode, requestKeepBorder:
	default:
		panic(fmt.Sprintf("placement: encode answer to a request of kind %d", kind))
	}
	return dst
}

func decodeResponse(kind requestKind, p []byte) (response, error) {
	r, err := answerBody(p)
	if err != nil {
		return response{}, err
	}
	var a response
	switch kind {
	case requestStatus:
		a.Status = Status{Leader: keyspace.NodeID(r.Uvarint()), Term: r.Uvarint(), Index: r.Uvarint(), Applied: r.Uvarint(), Replicas: r.replicas(), ConfIndex: r.Uvarint()}
	case requestAllocate:
		a.First = keyspace.RangeID(r.Uvarint())
	case requestReport:
		a.Held = r.descriptors(maxDescriptors)
	case requestCompact:
		a.Revision = r.revision()
	case requestMembers:
		a.Nodes = r.nodes()
	case requestStop:
		a.Verdict = verdict(r.Byte())
	case requestStanding:
		a.Standing = standing{boot: keyspace.BootID(r.Uint64BE()), phase: stopPhase(r.Byte())}
		if a.Standing.phase > stopClosed {
			r.Failf("a node stands at phase %d of a stop", a.Standing.phase)
		}
	case requestSettings:
		a.Revision = r.revision()
		n := r.count(maxSettings, 2)
		for range n {
			a.Settings = append(a.Settings, Setting{Name: r.string(maxNameBytes), Value: r.bytes(maxSettingBytes)})
		}
	case requestLease:
		a.Lease = r.leaseResponse()
	case requestBegin, requestOperations:
		n := r.count(maxOperations, 7)
		for range n {
			a.Operations = append(a.Operations, r.operation())
		}
	case requestPutNode, requestTransfer, requestPutSetting, requestSetNodeState, requestRemoveNode, requestKeepBorder:
	}
	if err := r.end(); err != nil {
		return response{}, fmt.Errorf("decode answer to a placement request of kind %d: %w", kind, err)
	}
	return a, nil
}
