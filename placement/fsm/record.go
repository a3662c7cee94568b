package fsm

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/keyspace"
)

// Range is one row of the range map.
type Range struct {
	// Descriptor is the newest copy of the range's own that was reported.
	Descriptor keyspace.Descriptor
	// Preferred is the node where placement would like the leader to be.
	Preferred keyspace.NodeID
	// Created says that all replicas exist. Only ranges of the bootstrap begin without it.
	Created bool
	// Kept says that somebody wants the range to begin where it does: its neighbour absorbs
	// it by command alone.
	Kept bool
	// Changed is the raft index of the entry that last changed this row.
	Changed uint64
}

// meta holds the state's scalars, stored as one record.
type meta struct {
	Cluster keyspace.ClusterID
	// Ceiling bounds the revisions that were ever allocated.
	Ceiling keyspace.Revision
	// Compacted is the compacted revision, -1 while nothing was ever compacted.
	Compacted keyspace.Revision
	// Settings counts the changes of settings.
	Settings keyspace.Revision
	// NextRange and NextReplica are ids never given to anybody yet.
	NextRange   keyspace.RangeID
	NextReplica keyspace.ReplicaID
	// Changed is the raft index of the last change of the range map, the node table or the
	// cluster version: their version. NodesChanged is that of the node table alone.
	Changed, NodesChanged uint64
	// ClusterVersion is the one in which all nodes write. A new cluster has 0: not all of its nodes
	// have said yet what they read.
	ClusterVersion keyspace.Version
}

// Records live in the group's own space of the engine, under these first bytes.
const (
	recordMeta    = 'm'
	recordNode    = 'n' // + node id, 8 bytes, big endian
	recordRange   = 'r' // + range id, 8 bytes, big endian
	recordSetting = 's' // + name
	recordLease   = 'l' // + lease id, 8 bytes, big endian

	recordOperation = 'o' // + range id, 8 bytes, big endian

	recordAccess = 'a'
	recordUser   = 'u' // + name
	recordRole   = 'p' // + name

	recordAlarm = 'w' // + type, 4 bytes, and member, 8 bytes, big endian

	recordHold    = 'h' // + hold id, 8 bytes, big endian
	recordLoading = 'd'
)

func nodeKey(id keyspace.NodeID) []byte {
	return binary.BigEndian.AppendUint64([]byte{recordNode}, uint64(id))
}

func rangeKey(id keyspace.RangeID) []byte {
	return binary.BigEndian.AppendUint64([]byte{recordRange}, uint64(id))
}

func operationKey(id keyspace.RangeID) []byte {
	return binary.BigEndian.AppendUint64([]byte{recordOperation}, uint64(id))
}

func settingKey(name string) []byte { return append([]byte{recordSetting}, name...) }

func appendMeta(dst []byte, m *meta) []byte {
	dst = append(dst, FormatVersion)
	dst = binary.BigEndian.AppendUint64(dst, uint64(m.Cluster))
	dst = AppendRevision(dst, m.Ceiling)
	dst = AppendRevision(dst, m.Compacted)
	dst = AppendRevision(dst, m.Settings)
	dst = binary.AppendUvarint(dst, uint64(m.NextRange))
	dst = binary.AppendUvarint(dst, uint64(m.NextReplica))
	dst = binary.AppendUvarint(dst, m.Changed)
	return appendVersion(binary.AppendUvarint(dst, m.NodesChanged), m.ClusterVersion)
}

func decodeMeta(b []byte) (meta, error) {
	r := NewReader(b)
	r.Version()
	m := meta{
		Cluster: keyspace.ClusterID(r.Uint64BE()),
		Ceiling: r.Revision(), Compacted: r.Revision(), Settings: r.Revision(),
		NextRange:   keyspace.RangeID(r.Uvarint()),
		NextReplica: keyspace.ReplicaID(r.Uvarint()),
		Changed:     r.Uvarint(), NodesChanged: r.Uvarint(),
		ClusterVersion: r.ClusterVersion(),
	}
	if err := r.Finish(); err != nil {
		return meta{}, fmt.Errorf("decode placement meta record: %w", err)
	}
	return m, nil
}

// AppendRange appends a row of the range map, which feeds hold too.
func AppendRange(dst []byte, g *Range) []byte {
	dst = binary.AppendUvarint(dst, uint64(g.Preferred))
	dst = AppendBool(dst, g.Created)
	dst = AppendBool(dst, g.Kept)
	dst = binary.AppendUvarint(dst, g.Changed)
	return keyspace.AppendDescriptor(dst, &g.Descriptor)
}

// RangeRow reads a row of the range map.
func (r *Reader) RangeRow() Range {
	return Range{
		Preferred:  keyspace.NodeID(r.Uvarint()),
		Created:    r.Bool(),
		Kept:       r.Bool(),
		Changed:    r.Uvarint(),
		Descriptor: r.Descriptor(),
	}
}

func decodeRange(b []byte) (Range, error) {
	r := NewReader(b)
	r.Version()
	g := r.RangeRow()
	if err := r.Finish(); err != nil {
		return Range{}, fmt.Errorf("decode placement range record: %w", err)
	}
	return g, nil
}

func decodeSetting(b []byte) ([]byte, error) {
	r := NewReader(b)
	r.Version()
	v := r.CopyUpTo(MaxSettingBytes)
	if err := r.Finish(); err != nil {
		return nil, fmt.Errorf("decode placement setting: %w", err)
	}
	return v, nil
}

// recordWriter is what the records are written to.
type recordWriter interface {
	Set(key, value []byte) error
	Delete(key []byte) error
}

func put(w recordWriter, key []byte, exists bool, encode func([]byte) []byte) error {
	if !exists {
		return w.Delete(key)
	}
	return w.Set(key, encode([]byte{FormatVersion}))
}
