package node

import (
	"encoding/json"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/join"
)

// FuzzAdmin: any check of another node is answered or refused. A node that has
// not been admitted itself gives the question back, and nothing that the asker has claimed.
func FuzzAdmin(f *testing.F) {
	b, err := json.Marshal(join.Check{Node: 7})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(append([]byte{questionCheck}, b...))
	f.Add([]byte{questionCheck})
	f.Add([]byte{0xff})
	f.Fuzz(func(t *testing.T, payload []byte) {
		if len(payload) > 0 && payload[0] == questionReport {
			t.Skip() // has no content, and wants a whole node
		}
		answer, err := (&Core{admission: join.New(join.Options{})}).handleQuestion(t.Context(), keyspace.NodeID(2), payload)
		if err != nil {
			return
		}
		var q, a join.Check
		if err := json.Unmarshal(payload[1:], &q); err != nil {
			t.Fatalf("%q is answered: %v", payload, err)
		}
		// The question is the node alone; what else it says is the answerer's to say.
		if err := json.Unmarshal(answer, &a); err != nil || a != (join.Check{Node: q.Node}) {
			t.Fatalf("%q is answered with %q, %v", payload, answer, err)
		}
	})
}
