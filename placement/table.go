package placement

import (
	"fmt"

	"github.com/skeindb/skein/placement/fsm"
)

// EncodeNodeTable returns rows of the node table in the form in which nodes keep them and
// tell them to those that join.
func EncodeNodeTable(ns []fsm.Node) []byte { return fsm.AppendNodes([]byte{fsm.FormatVersion}, ns) }

// DecodeNodeTable reads what EncodeNodeTable wrote. It copies what it keeps of b.
func DecodeNodeTable(b []byte) ([]fsm.Node, error) {
	r := fsm.NewReader(b)
	r.Version()
	ns := r.Nodes()
	if err := r.Finish(); err != nil {
		return nil, fmt.Errorf("decode node table: %w", err)
	}
	return ns, nil
}
