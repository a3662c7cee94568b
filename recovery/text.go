package recovery

import (
	"fmt"
	"strconv"

	"github.com/skeindb/skein/keyspace"
)

// key is a key in a file that people read: as in a Go string, without the quotes. An empty one as the
// end of a span is beyond all keys.
type key []byte

// MarshalText implements encoding.TextMarshaler.
func (k key) MarshalText() ([]byte, error) {
	q := strconv.AppendQuoteToASCII(nil, string(k))
	return q[1 : len(q)-1], nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (k *key) UnmarshalText(b []byte) error {
	s, err := strconv.Unquote(`"` + string(b) + `"`)
	if err != nil {
		return fmt.Errorf("key %q is not written as in a Go string", b)
	}
	*k = nil
	if s != "" {
		*k = key(s)
	}
	return nil
}

// id is a number of 64 bits in hexadecimal, as nodes and clusters are written everywhere.
type id uint64

// MarshalText implements encoding.TextMarshaler.
func (i id) MarshalText() ([]byte, error) { return strconv.AppendUint(nil, uint64(i), 16), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (i *id) UnmarshalText(b []byte) error {
	n, err := strconv.ParseUint(string(b), 16, 64)
	if err != nil {
		return fmt.Errorf("id %q is not a hexadecimal number", b)
	}
	*i = id(n)
	return nil
}

func (i id) node() keyspace.NodeID { return keyspace.NodeID(i) }

// Member is a replica of a group.
type Member struct {
	Replica keyspace.ReplicaID `json:"replica"`
	Node    id                 `json:"node"`
	Role    string             `json:"role"`
}

// roles are the names of the roles, by number.
var roles = [...]string{"voter", "learner", "incoming voter", "outgoing voter", "demoting voter"}

func membersOf(rs []keyspace.Replica) []Member {
	ms := make([]Member, len(rs))
	for i, r := range rs {
		ms[i] = Member{Replica: r.ID, Node: id(r.Node), Role: roles[r.Role]}
	}
	return ms
}

func replicasOf(ms []Member) ([]keyspace.Replica, error) {
	rs := make([]keyspace.Replica, len(ms))
	for i, m := range ms {
		rs[i] = keyspace.Replica{ID: m.Replica, Node: m.Node.node()}
		role := -1
		for n, name := range roles {
			if name == m.Role {
				role = n
			}
		}
		if role < 0 {
			return nil, fmt.Errorf("replica %d has the unknown role %q", m.Replica, m.Role)
		}
		rs[i].Role = keyspace.Role(role)
	}
	return rs, nil
}

// groupName names a group for people; range 0 is the placement group.
func groupName(r keyspace.RangeID) string {
	if r == 0 {
		return "the placement group"
	}
	return "range " + r.String()
}
