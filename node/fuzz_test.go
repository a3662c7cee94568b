package node

import (
	"encoding/json"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// FuzzAdmin: any introduction of another node is answered or refused. A node that has
// not been let in itself gives the question back, and nothing that the asker has claimed.
func FuzzAdmin(f *testing.F) {
	b, err := json.Marshal(introduction{Node: 7})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(append([]byte{adminIntroduce}, b...))
	f.Add([]byte{adminIntroduce})
	f.Add([]byte{0xff})
	f.Fuzz(func(t *testing.T, payload []byte) {
		if len(payload) > 0 && payload[0] == adminReport {
			t.Skip() // has no content, and wants a whole node
		}
		answer, err := (&Core{}).handleAdmin(t.Context(), keyspace.NodeID(2), payload)
		if err != nil {
			return
		}
		var q, a introduction
		if err := json.Unmarshal(payload[1:], &q); err != nil {
			t.Fatalf("%q is answered: %v", payload, err)
		}
		// The question is the node alone; what else it says is the answerer's to say.
		if err := json.Unmarshal(answer, &a); err != nil || a != (introduction{Node: q.Node}) {
			t.Fatalf("%q is answered with %q, %v", payload, answer, err)
		}
	})
}
