package fsm

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// NodeState is what a node is to the cluster, as the operator wants it; the numbers are
// stored. Whether a node lives is not in it.
type NodeState byte

// The states of a node.
const (
	// NodeUnstarted: it was admitted and has not served yet. It gets nothing.
	NodeUnstarted NodeState = iota
	// NodeServing is the ordinary state.
	NodeServing
	// NodeDraining gives up its leaders and gets neither leaders nor replicas: it is about
	// to be stopped and to come back. Its replicas stay.
	NodeDraining
	// NodeDecommissioned gives up its replicas too: it is about to go for good. As long as
	// its row is there it can be taken back.
	NodeDecommissioned
	// NodeRemoved is gone for good. Its row is left for a while, so that it can be told.
	NodeRemoved
	// NodeUnstartedLearner is NodeUnstarted of a node that etcd's clients have added as a
	// learner.
	NodeUnstartedLearner
	// NodeLearner serves clients and gets neither leaders nor replicas before it is
	// promoted.
	NodeLearner
)

var nodeStates = [...]string{"unstarted", "serving", "draining", "decommissioned", "removed", "unstarted learner", "learner"}

// Learner says whether etcd's clients see the node as a learner.
func (s NodeState) Learner() bool { return s == NodeUnstartedLearner || s == NodeLearner }

// Started says whether the node has served, and is one of the cluster's.
func (s NodeState) Started() bool {
	return s != NodeUnstarted && s != NodeUnstartedLearner && s != NodeRemoved
}

// Leaving says whether the node is on its way out, for a while or for good: it is to be done
// without.
func (s NodeState) Leaving() bool { return s == NodeDraining || s == NodeDecommissioned }

// Member says whether the node counts where the number of voters depends on how many nodes there
// are: it serves, or is to serve again.
func (s NodeState) Member() bool { return s == NodeServing || s == NodeDraining }

// String returns the state in one word.
func (s NodeState) String() string {
	if !s.known() {
		return fmt.Sprintf("node state %d", byte(s))
	}
	return nodeStates[s]
}

func (s NodeState) known() bool { return int(s) < len(nodeStates) }

// becomes says whether an operator may have a node go from one state to the other. An unstarted
// node reports by itself that it serves, and a removed node must hold nothing. Those two
// transitions are commands of their own.
func (s NodeState) becomes(to NodeState) bool {
	switch s {
	case NodeServing:
		return to == NodeDraining || to == NodeDecommissioned
	case NodeDraining:
		return to == NodeServing || to == NodeDecommissioned
	case NodeDecommissioned:
		return to == NodeServing
	case NodeLearner:
		return to == NodeServing || to == NodeDecommissioned
	case NodeUnstarted, NodeUnstartedLearner, NodeRemoved:
	}
	return false
}

// UnixMillis is a time of a wall clock: milliseconds since 1970. It is for people:
// nothing that must be right depends on it.
type UnixMillis int64

// Time returns the time; the zero Time where nobody knows it.
func (m UnixMillis) Time() time.Time {
	if m == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(m))
}

// Attribute is something that an operator says of a node, as zone=a.
type Attribute struct{ Key, Value string }

// Bounds of a node's attributes.
const (
	maxAttributes     = 32
	maxAttributeKey   = 64
	maxAttributeValue = 256
)

// ParseAttributes reads attributes of the form KEY=VALUE,KEY=VALUE. They come out in the
// order of their keys.
func ParseAttributes(text string) ([]Attribute, error) {
	var as []Attribute
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		key, value, ok := strings.Cut(part, "=")
		if !ok {
			return nil, fmt.Errorf("attribute %q is not of the form KEY=VALUE", part)
		}
		as = append(as, Attribute{key, value})
	}
	slices.SortFunc(as, func(a, b Attribute) int { return cmp.Compare(a.Key, b.Key) })
	return as, checkAttributes(as)
}

// checkAttributes returns an error for attributes that no row may have.
func checkAttributes(as []Attribute) error {
	if len(as) > maxAttributes {
		return fmt.Errorf("%d attributes, at most %d", len(as), maxAttributes)
	}
	for i, a := range as {
		switch {
		case a.Key == "" || a.Value == "":
			return fmt.Errorf("attribute %q has no key or no value", a.Key+"="+a.Value)
		case len(a.Key) > maxAttributeKey:
			return fmt.Errorf("the key of attribute %s has %d bytes, at most %d", a.Key, len(a.Key), maxAttributeKey)
		case len(a.Value) > maxAttributeValue:
			return fmt.Errorf("the value of attribute %s has %d bytes, at most %d", a.Key, len(a.Value), maxAttributeValue)
		case strings.ContainsFunc(a.Key+a.Value, notInAttribute):
			return fmt.Errorf("attribute %q has other characters than letters, digits and ._-/: in it", a.Key+"="+a.Value)
		case i > 0 && a.Key == as[i-1].Key:
			return fmt.Errorf("attribute %s is given twice", a.Key)
		case i > 0 && a.Key < as[i-1].Key:
			return fmt.Errorf("attribute %s comes after %s", a.Key, as[i-1].Key)
		}
	}
	return nil
}

func notInAttribute(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-/:", r)
}

// Node is one row of the node table (etcd: a member).
type Node struct {
	ID keyspace.NodeID
	// Name is the node's human-readable name, which it was started with.
	Name string
	// PeerURLs are the addresses of its bus, ClientURLs those where it serves etcd
	// clients; the latter are empty until the node has started once.
	PeerURLs, ClientURLs []string
	// State is what it is to the cluster, Since when it became that; 0 is not known.
	State NodeState
	Since UnixMillis
	// Leaves says of a decommissioned node that it is removed as soon as it holds nothing.
	Leaves bool
	// Attributes are what an operator says of it, in the order of their keys.
	Attributes []Attribute
	// Instance is that of the directory whose node this is (engine.Identity); 0 is not known
	// yet. Once it is, no other directory is this node's.
	Instance uint64
	// Build names the build that the node runs, for people. Reads are the versions that this
	// build reads, and ReadsSince is when the node first said so.
	Build      string
	Reads      keyspace.Versions
	ReadsSince UnixMillis
}

// Attribute returns the value of one of the node's attributes, "" where it has none.
func (n *Node) Attribute(key string) string {
	for _, a := range n.Attributes {
		if a.Key == key {
			return a.Value
		}
	}
	return ""
}

// OtherThan says whether the node is known to be that of another directory than the one with
// an instance.
func (n *Node) OtherThan(instance uint64) bool {
	return n.Instance != 0 && n.Instance != instance && !mutation.Is(mutation.RowGivenTwice)
}

// Says whether both rows say the same of the node itself, whatever its state.
func (n *Node) Says(o *Node) bool {
	return n.ID == o.ID && n.Name == o.Name && slices.Equal(n.PeerURLs, o.PeerURLs) &&
		slices.Equal(n.ClientURLs, o.ClientURLs) && slices.Equal(n.Attributes, o.Attributes) && n.Instance == o.Instance &&
		n.Build == o.Build && n.Reads == o.Reads
}

// Equal says whether both rows are the same.
func (n *Node) Equal(o *Node) bool {
	return n.Says(o) && n.State == o.State && n.Since == o.Since && n.Leaves == o.Leaves && n.ReadsSince == o.ReadsSince
}

// Validate returns an error for a row that a decoder would not accept.
func (n *Node) Validate() error {
	if len(n.Name) > MaxNameBytes {
		return fmt.Errorf("node %s: the name has %d bytes, at most %d", n.ID, len(n.Name), MaxNameBytes)
	}
	if len(n.Build) > MaxNameBytes {
		return fmt.Errorf("node %s: the build's name has %d bytes, at most %d", n.ID, len(n.Build), MaxNameBytes)
	}
	for _, urls := range [][]string{n.PeerURLs, n.ClientURLs} {
		if len(urls) > maxURLs {
			return fmt.Errorf("node %s: %d URLs, at most %d", n.ID, len(urls), maxURLs)
		}
		for _, u := range urls {
			if len(u) > maxURLBytes {
				return fmt.Errorf("node %s: a URL has %d bytes, at most %d", n.ID, len(u), maxURLBytes)
			}
		}
	}
	if err := checkAttributes(n.Attributes); err != nil {
		return fmt.Errorf("node %s: %w", n.ID, err)
	}
	return nil
}

// AppendNode appends a row of the node table, which commands and feeds hold too.
func AppendNode(dst []byte, n *Node) []byte {
	dst = binary.AppendUvarint(dst, uint64(n.ID))
	dst = AppendString(dst, n.Name)
	dst = appendStrings(dst, n.PeerURLs)
	dst = appendStrings(dst, n.ClientURLs)
	dst = append(dst, byte(n.State))
	dst = binary.AppendUvarint(dst, uint64(n.Since))
	dst = AppendBool(dst, n.Leaves)
	dst = binary.AppendUvarint(dst, uint64(len(n.Attributes)))
	for _, a := range n.Attributes {
		dst = AppendString(AppendString(dst, a.Key), a.Value)
	}
	dst = binary.BigEndian.AppendUint64(dst, n.Instance)
	dst = AppendString(dst, n.Build)
	dst = appendVersion(appendVersion(dst, n.Reads.Oldest), n.Reads.Newest)
	return binary.AppendUvarint(dst, uint64(n.ReadsSince))
}

// minNodeBytes is the size of the smallest row.
const minNodeBytes = 20

// Node reads a row of the node table.
func (r *Reader) Node() Node {
	n := Node{
		ID:         keyspace.NodeID(r.Uvarint()),
		Name:       r.StringUpTo(MaxNameBytes),
		PeerURLs:   r.StringsUpTo(maxURLs, maxURLBytes),
		ClientURLs: r.StringsUpTo(maxURLs, maxURLBytes),
		State:      r.NodeState(),
		Since:      r.millis(),
		Leaves:     r.Bool(),
	}
	if n.Leaves && n.State != NodeDecommissioned {
		r.Failf("node %s is %s, and leaves", n.ID, n.State)
	}
	for range r.CountUpTo(maxAttributes, 2) {
		n.Attributes = append(n.Attributes, Attribute{r.StringUpTo(maxAttributeKey), r.StringUpTo(maxAttributeValue)})
	}
	n.Instance = r.Uint64BE()
	n.Build = r.StringUpTo(MaxNameBytes)
	n.Reads = keyspace.Versions{Oldest: r.ClusterVersion(), Newest: r.ClusterVersion()}
	n.ReadsSince = r.millis()
	if n.Reads.Oldest > n.Reads.Newest {
		r.Failf("node %s reads versions %d to %d", n.ID, n.Reads.Oldest, n.Reads.Newest)
	}
	if err := checkAttributes(n.Attributes); err != nil {
		r.Failf("node %s: %w", n.ID, err)
	}
	return n
}

// NodeState reads the state of a node.
func (r *Reader) NodeState() NodeState {
	s := NodeState(r.Byte())
	if !s.known() {
		r.Failf("unknown %s", s)
	}
	return s
}

// millis reads a time, which no clock shows beyond the year 10,000.
func (r *Reader) millis() UnixMillis {
	v := r.Uvarint()
	if v > MaxMillis {
		r.Failf("%d ms since 1970", v)
		return 0
	}
	return UnixMillis(v)
}

// MaxMillis is the end of the year 9999.
const MaxMillis = 253_402_300_799_999

// Nodes reads a list of rows.
func (r *Reader) Nodes() []Node {
	var ns []Node
	for range r.CountUpTo(maxNodes, minNodeBytes) {
		if ns = append(ns, r.Node()); !r.OK() {
			return nil
		}
	}
	return ns
}

// AppendNodes appends a list of rows of the node table to dst.
func AppendNodes(dst []byte, ns []Node) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ns)))
	for i := range ns {
		dst = AppendNode(dst, &ns[i])
	}
	return dst
}

func decodeNode(b []byte) (Node, error) {
	r := NewReader(b)
	r.Version()
	n := r.Node()
	if err := r.Finish(); err != nil {
		return Node{}, fmt.Errorf("decode placement node record: %w", err)
	}
	return n, nil
}

// NodeChange is what a row is put for; the numbers are stored.
type NodeChange byte

const (
	// NodePublishes is put by the node itself, which has a row. An unstarted node serves from then on.
	NodePublishes NodeChange = iota
	// NodeIsAdded is put for a node that the table does not have yet.
	NodeIsAdded
	// NodeHasMoved changes the peer URLs, and nothing else of the row.
	NodeHasMoved
	// NodeIsClaimed changes the instance, and nothing else of the row.
	NodeIsClaimed
)

// NodeChange reads what a row is put for.
func (r *Reader) NodeChange() NodeChange {
	c := NodeChange(r.Byte())
	if c > NodeIsClaimed {
		r.Failf("unknown kind %d of change of a node", byte(c))
	}
	return c
}

// PutNode writes one row of the node table. State, Since, Leaves and ReadsSince of what is given
// do not count; Now is the proposer's time.
type PutNode struct {
	Change NodeChange
	Now    UnixMillis
	Node   Node
}

// SetNodeState has a node go from one state to another. With Leave, which goes with
// NodeDecommissioned alone, it is removed once it holds nothing. Beside are the nodes that were
// on their way out when somebody checked whether this one may leave too. Otherwise two nodes
// that are asked in the same instant would each be checked without the other.
type SetNodeState struct {
	Node     keyspace.NodeID
	From, To NodeState
	Leave    bool
	Beside   []keyspace.NodeID
	Now      UnixMillis
}

// RemoveNode leaves of a node's row only what says that it was removed.
type RemoveNode struct {
	Node keyspace.NodeID
	Now  UnixMillis
}

func (PutNode) kind() opKind      { return opPutNode }
func (SetNodeState) kind() opKind { return opSetNodeState }
func (RemoveNode) kind() opKind   { return opRemoveNode }

func (o PutNode) append(dst []byte) []byte {
	dst = append(dst, byte(o.Change))
	dst = binary.AppendUvarint(dst, uint64(o.Now))
	return AppendNode(dst, &o.Node)
}

func (o SetNodeState) append(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(o.Node))
	dst = AppendBool(append(dst, byte(o.From), byte(o.To)), o.Leave)
	return binary.AppendUvarint(AppendNodeIDs(dst, o.Beside), uint64(o.Now))
}

func (o RemoveNode) append(dst []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(o.Node)), uint64(o.Now))
}

func (s *State) applyPutNode(index uint64, o PutNode) Result {
	n := o.Node
	old, known := s.nodes[n.ID]
	n.State, n.Since, n.Leaves, n.ReadsSince = old.State, old.Since, old.Leaves, old.ReadsSince
	switch {
	case known && old.State == NodeRemoved:
		return Result{Err: errNodeRemoved(&old)}
	case !known && o.Change == NodePublishes:
		// A node has a row before it has a directory.
		return Result{Err: errNodeRemoved(&n)}
	case !known && (o.Change == NodeHasMoved || o.Change == NodeIsClaimed):
		return Result{Err: kverror.New(kverror.NodeNotFound, "there is no node %s", n.ID)}
	case !known && len(s.nodes) >= maxNodes:
		return Result{Err: kverror.New(kverror.TooManyRequests, "there are %d nodes, those that were removed among them, and no more are admitted", len(s.nodes))}
	case old.OtherThan(n.Instance) && (o.Change == NodeIsClaimed || o.Change == NodePublishes):
		return Result{Err: kverror.New(kverror.NodeExists, "node %s (%s) is that of another directory", n.ID, old.Name)}
	case o.Change == NodePublishes && n.Reads.Newest < s.ClusterVersion:
		return Result{Err: errOlderBuild(&n, s.ClusterVersion)}
	case o.Change != NodePublishes && s.peerURLTaken(&n):
		return Result{Err: kverror.New(kverror.PeerURLExists, "another node has one of the peer URLs %v", n.PeerURLs)}
	case o.Change == NodeIsAdded && s.nameTaken(&n):
		return Result{Err: kverror.New(kverror.NodeExists, "another node is named %s", n.Name)}
	case o.Change == NodeHasMoved:
		n = old
		n.PeerURLs = o.Node.PeerURLs
	case o.Change == NodeIsClaimed:
		n = old
		n.Instance = o.Node.Instance
	case o.Change == NodeIsAdded && !known:
		n.State, n.Since = NodeUnstarted, o.Now
		if o.Node.State.Learner() {
			n.State = NodeUnstartedLearner
		}
	case o.Change == NodeIsAdded && (old.State.Started() || !old.Says(&n)):
		return Result{Err: kverror.New(kverror.NodeExists, "node %s is there already", n.ID)}
	case o.Change == NodePublishes:
		n = o.published(&old)
	}
	if !known || n.State != old.State || !n.Says(&old) {
		s.putNodeRow(index, n)
	}
	return Result{}
}

// published is the row of a node that there is after it has published itself: it serves. Only
// an operator changes the address of a node's bus, as with etcd's members. A move is known in
// advance, and no two nodes have the same address.
func (o *PutNode) published(old *Node) Node {
	n := o.Node
	n.State, n.Since, n.Leaves, n.ReadsSince = old.State, old.Since, old.Leaves, old.ReadsSince
	if n.Reads != old.Reads {
		n.ReadsSince = o.Now
	}
	if len(old.PeerURLs) > 0 {
		n.PeerURLs = old.PeerURLs
	}
	switch old.State {
	case NodeUnstarted:
		n.State, n.Since = NodeServing, o.Now
	case NodeUnstartedLearner:
		n.State, n.Since = NodeLearner, o.Now
	case NodeServing, NodeDraining, NodeDecommissioned, NodeRemoved, NodeLearner:
	}
	return n
}

// nameTaken says whether another node has the row's name. Founders may be named alike, and
// members that etcd's clients add have no name before they start.
func (s *State) nameTaken(n *Node) bool {
	for _, o := range s.nodes {
		if o.ID != n.ID && o.State != NodeRemoved && n.Name != "" && o.Name == n.Name {
			return true
		}
	}
	return false
}

// peerURLTaken says whether another node has a peer URL of the row.
func (s *State) peerURLTaken(n *Node) bool {
	for _, o := range s.nodes {
		if o.ID != n.ID && slices.ContainsFunc(o.PeerURLs, func(u string) bool { return slices.Contains(n.PeerURLs, u) }) {
			return true
		}
	}
	return false
}

// errOlderBuild refuses a node whose build does not read what the others write.
func errOlderBuild(n *Node, v keyspace.Version) error {
	return kverror.New(kverror.BadRequest, "the cluster has version %d, and build %s of node %s reads %s: start a newer build",
		v, cmp.Or(n.Build, "unknown"), cmp.Or(n.Name, n.ID.String()), n.Reads)
}

func errNodeRemoved(n *Node) error {
	return kverror.New(kverror.NodeRemoved, "node %s (%s) was removed from the cluster; its id is never admitted again", n.ID, n.Name)
}

func (s *State) putNodeRow(index uint64, n Node) {
	s.nodes[n.ID] = n
	s.dirty.nodes[n.ID] = true
	s.NodesChanged = index
	s.changedMap(index)
}

func (s *State) applySetNodeState(index uint64, o SetNodeState) Result {
	n, ok := s.nodes[o.Node]
	switch {
	case !ok:
		return Result{Err: kverror.New(kverror.NodeNotFound, "there is no node %s", o.Node)}
	case n.State == NodeRemoved:
		return Result{Err: errNodeRemoved(&n)}
	case o.Leave && o.To != NodeDecommissioned:
		return Result{Err: kverror.New(kverror.BadRequest, "node %s is to be %s, and cannot leave with that", o.Node, o.To)}
	case n.State == o.To && o.Leave && !n.Leaves:
		n.Leaves = true // it was decommissioned by command, and is to go now
		s.putNodeRow(index, n)
		return Result{}
	case n.State == o.To && (o.From != o.To || o.Leave):
		return Result{} // asked again
	case n.State != o.From:
		return Result{Err: kverror.New(kverror.BadRequest, "node %s is %s, and not %s", o.Node, n.State, o.From)}
	case !o.From.becomes(o.To):
		return Result{Err: kverror.New(kverror.BadRequest, "node %s is %s, and cannot become %s", o.Node, o.From, o.To)}
	}
	if o.To.Leaving() {
		for id, other := range s.nodes {
			if id != o.Node && other.State.Leaving() && !slices.Contains(o.Beside, id) {
				return Result{Err: kverror.New(kverror.BadRequest, "node %s does not become %s: others have begun to leave since it was looked at whether it may", o.Node, o.To)}
			}
		}
	}
	n.State, n.Since, n.Leaves = o.To, o.Now, o.Leave
	s.putNodeRow(index, n)
	return Result{}
}

func (s *State) applyRemoveNode(index uint64, o RemoveNode) Result {
	n, ok := s.nodes[o.Node]
	switch {
	case !ok:
		return Result{Err: kverror.New(kverror.NodeNotFound, "there is no node %s", o.Node)}
	case n.State == NodeRemoved:
		return Result{} // asked again
	case n.State.Started() && n.State != NodeDecommissioned:
		return Result{Err: kverror.New(kverror.BadRequest, "node %s is %s: it is removed when it is decommissioned", o.Node, n.State)}
	}
	if err := s.holds(o.Node); err != nil {
		return Result{Err: kverror.New(kverror.BadRequest, "node %s is not removed: %v", o.Node, err)}
	}
	s.putNodeRow(index, Node{ID: n.ID, Name: n.Name, State: NodeRemoved, Since: o.Now})
	s.forgetRemoved(n.ID)
	return Result{}
}

// maxRemovedRows bounds the rows of removed nodes. They are for people, and for a removed node that
// comes back: it reaches its former peers only while they know its row, and is told there.
const maxRemovedRows = 1 << 10

// forgetRemoved forgets the nodes that were removed longest ago, but not the one just removed,
// however the proposers' clocks differ.
func (s *State) forgetRemoved(just keyspace.NodeID) {
	var removed []Node
	for _, n := range s.nodes {
		if n.State == NodeRemoved && n.ID != just {
			removed = append(removed, n)
		}
	}
	if len(removed) < maxRemovedRows {
		return
	}
	slices.SortFunc(removed, func(a, b Node) int { return cmp.Or(cmp.Compare(b.Since, a.Since), cmp.Compare(b.ID, a.ID)) })
	for _, n := range removed[maxRemovedRows-1:] {
		delete(s.nodes, n.ID)
		s.dirty.nodes[n.ID] = true
	}
}

// holds returns an error that says what the node holds, or is to hold, of the cluster.
func (s *State) holds(id keyspace.NodeID) error {
	if slices.ContainsFunc(s.members, func(m keyspace.Replica) bool { return m.Node == id }) {
		return errors.New("it has a replica of the placement group")
	}
	held := 0
	s.tree.Ascend(func(g *Range) bool {
		if _, ok := g.Descriptor.ReplicaOn(id); ok {
			held++
		}
		return true
	})
	if held > 0 {
		return fmt.Errorf("it has replicas of %d ranges", held)
	}
	for _, o := range s.operations {
		if o.To == id {
			return fmt.Errorf("operation %d moves a replica there", o.ID)
		}
	}
	return nil
}
