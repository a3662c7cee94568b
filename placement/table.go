package placement

import (
	"fmt"

	"github.com/skeindb/skein/internal/wire"
)

// EncodeNodeTable returns rows of the node table in the form in which nodes keep them and
// tell them to those that join.
func EncodeNodeTable(ns []Node) []byte { return appendNodes([]byte{formatVersion}, ns) }

// DecodeNodeTable reads what EncodeNodeTable wrote. It copies what it keeps of b.
func DecodeNodeTable(b []byte) ([]Node, error) {
	r := reader{wire.NewReader(b)}
	r.version()
	ns := r.nodes()
	if err := r.end(); err != nil {
		return nil, fmt.Errorf("decode node table: %w", err)
	}
	return ns, nil
}
