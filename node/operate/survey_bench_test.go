package operate

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/shard"
)

// many is a cluster of very many ranges, whose nodes have their lists ready: as values, or with coded as the bus brings them.
type many struct {
	*fake
	lists map[keyspace.NodeID][]shard.Summary
	coded map[keyspace.NodeID][]byte
}

func (m *many) List(_ context.Context, n keyspace.NodeID) (l []shard.Summary, err error) {
	if b := m.coded[n]; b != nil {
		return l, json.Unmarshal(b, &l)
	}
	return m.lists[n], nil
}

// RangeMap is read from the map, as placement's client does.
func (m *many) RangeMap(context.Context) ([]keyspace.Descriptor, error) {
	return m.known.Descriptors(), nil
}

// newMany lays ranges over nodes as the simulator of placement does: replicas of three follow each other, and the leaders too.
func newMany(nodes, ranges int) *many {
	m := &many{fake: newFake(keyspace.NodeID(nodes)), lists: map[keyspace.NodeID][]shard.Summary{}, coded: map[keyspace.NodeID][]byte{}}
	var rows []*fsm.Range
	key := func(i int) []byte { return []byte{byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)} }
	for i := range ranges {
		d := keyspace.Descriptor{Range: keyspace.RangeID(i + 1), Generation: 1, ConfIndex: 1}
		if i > 0 {
			d.Span.Start = key(i)
		}
		if i < ranges-1 {
			d.Span.End = key(i + 1)
		}
		for k := range 3 {
			node := keyspace.NodeID((i*3+k)%nodes + 1)
			d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(i*3 + k + 1), Node: node, Role: keyspace.RoleVoter})
		}
		leader := d.Replicas[i/nodes%3].Node
		rows = append(rows, &fsm.Range{Descriptor: d})
		for _, r := range d.Replicas {
			m.lists[r.Node] = append(m.lists[r.Node], shard.Summary{Descriptor: d, LeaderNode: leader, IsLeader: r.Node == leader, Keys: 100, Bytes: 1 << 20})
		}
	}
	m.known = (&fsm.Map{}).With(1, rows, m.nodes, keyspace.Descriptor{ConfIndex: 1, Replicas: m.group.Replicas})
	return m
}

// BenchmarkSurvey makes what the console's overview and skein status show of 100,000 ranges on 100 nodes. The lists of the nodes
// are at hand, one row of them may be newer than the map, or they are read as the bus brings them.
func BenchmarkSurvey(b *testing.B) {
	for _, name := range []string{"at-hand", "newer", "read"} {
		coded := name == "read"
		b.Run("lists="+name, func(b *testing.B) {
			m := newMany(100, 100_000)
			if name == "newer" {
				m.lists[1][500].Descriptor.ConfIndex++
			}
			for n, l := range m.lists {
				var err error
				if coded {
					m.coded[n], err = json.Marshal(l)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			a := New(Options{
				Self: 1, Clock: clock.System(), Election: time.Second, Heartbeat: 100 * time.Millisecond, Logger: zap.NewNop(),
				Placement: m, Replicas: m, Routes: m, Peers: m, Served: m,
			})
			b.ReportAllocs()
			began := measure.CPU()
			for b.Loop() {
				s, err := a.Survey(b.Context())
				if err != nil || s.GetRanges() != 100_000 || s.GetMissing() != 0 || s.GetLeaderless() != 0 || len(s.GetOutages()) != 0 {
					b.Fatal(s, err)
				}
			}
			b.ReportMetric(float64(measure.CPU()-began)/float64(b.N)/1e6, "cpu-ms/op")
		})
	}
}
