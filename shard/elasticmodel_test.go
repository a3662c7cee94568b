package shard

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// elasticModel records all that happened: every version that the leader's node ever had, and all
// answers to clients and coordinators. The versions of a key come one after the other, as in a
// single store. In the end the answers are judged by them.
//
//   - A version that comes is above every resolved revision that a replica has named, and above
//     every compacted one of its range. It is its key's newest, and counts on from the one
//     before. It stays, until a compaction may remove it.
//   - A replica has all versions up to its resolved revision.
//   - A read shows the state at its revision, a page of history all events up to its own.
//   - A write that was answered is there, at the revision that was told, and found what it
//     says. One that is said not to have happened is not there.
//   - A committed transaction is there as a whole, at its revision, and what it compared was so
//     just before. One that is not committed is not there; where nobody knows it is either.
type elasticModel struct {
	versions map[string][]mvcc.Version
	// resolved is the highest resolved revision that anybody named of a key's range, and
	// compacted up to where the leader's has let versions go.
	resolved, compacted map[string]keyspace.Revision
	writes              []*elasticWrite
	txns                []*elasticTxn
	reads               []elasticRead
}

func newElasticModel() *elasticModel {
	return &elasticModel{
		versions: map[string][]mvcc.Version{},
		resolved: map[string]keyspace.Revision{}, compacted: map[string]keyspace.Revision{},
	}
}

// stored is every version that a node has.
func (e *elastic) stored(w *fakeWorld) (all []mvcc.Version) {
	_, err := mvcc.History(w.engine, mvcc.HistoryOptions{From: 1, To: keyspace.MaxRevision - 1}, func(v *mvcc.Version) error {
		all = append(all, v.Clone())
		return nil
	})
	if err != nil {
		e.fatal("%v", err)
	}
	return all
}

func versionText(v *mvcc.Version) string {
	if v.Tombstone {
		return fmt.Sprintf("%s@%d.%d gone", v.Key, v.Mod, v.Sub)
	}
	return fmt.Sprintf("%s@%d.%d=%s/%d", v.Key, v.Mod, v.Sub, v.Value, v.Lease)
}

// observe takes in what has come at the leader, and holds it against what is known.
func (m *elasticModel) observe(e *elastic) {
	stored := e.stored(e.leader)
	for i := range stored {
		v := &stored[i]
		key := string(v.Key)
		if m.knows(e, v) {
			continue
		}
		if v.Mod <= m.resolved[key] || v.Mod <= m.compacted[key] {
			e.fatal("%s comes, and all up to %d was resolved, up to %d compacted", versionText(v), m.resolved[key], m.compacted[key])
		}
		m.follows(e, v)
		m.versions[key] = append(m.versions[key], *v)
	}
	m.covers(e, e.leader, stored)
}

// holds fails if the follower's store has versions that the leader never had, or lacks versions
// that it should have.
func (m *elasticModel) holds(e *elastic) {
	m.observe(e)
	stored := e.stored(e.follower)
	for i := range stored {
		if !m.knows(e, &stored[i]) {
			e.fatal("follower: there is %s, which the leader never had", versionText(&stored[i]))
		}
	}
	m.covers(e, e.follower, stored)
}

// knows says whether the version was seen before, as it is.
func (m *elasticModel) knows(e *elastic, v *mvcc.Version) bool {
	for i := range m.versions[string(v.Key)] {
		o := &m.versions[string(v.Key)][i]
		if o.Mod != v.Mod {
			continue
		}
		if v.Sub != o.Sub || v.Create != o.Create || v.Version != o.Version || v.Lease != o.Lease || v.Tombstone != o.Tombstone || !bytes.Equal(v.Value, o.Value) {
			e.fatal("version %+v was %+v", *v, *o)
		}
		return true
	}
	return false
}

// follows fails where the version is not one behind its key's last one.
func (m *elasticModel) follows(e *elastic, v *mvcc.Version) {
	last := mvcc.Version{Tombstone: true}
	if all := m.versions[string(v.Key)]; len(all) > 0 {
		last = all[len(all)-1]
	}
	ok := v.Mod > last.Mod
	switch {
	case v.Tombstone:
		ok = ok && !last.Tombstone
	case last.Tombstone:
		ok = ok && v.Version == 1 && v.Create == v.Mod
	default:
		ok = ok && v.Version == last.Version+1 && v.Create == last.Create
	}
	if !ok {
		e.fatal("%+v comes behind %+v", *v, last)
	}
}

// covers fails where a node lacks what it should have: the leader everything, another replica all
// up to its resolved revision. Versions that others have replaced may be removed as far
// as the range is compacted.
func (m *elasticModel) covers(e *elastic, w *fakeWorld, stored []mvcc.Version) {
	has := map[string]map[keyspace.Revision]bool{}
	for i := range stored {
		key := string(stored[i].Key)
		if has[key] == nil {
			has[key] = map[keyspace.Revision]bool{}
		}
		has[key][stored[i].Mod] = true
	}
	for _, r := range w.over(keyspace.Span{}) {
		r.mu.Lock()
		span, resolved, compacted := r.rec.Span, r.resolved, r.rec.Compacted
		r.mu.Unlock()
		for key, all := range m.versions {
			if !span.Contains([]byte(key)) {
				continue
			}
			m.resolved[key] = max(m.resolved[key], resolved)
			if w == e.leader {
				m.compacted[key] = compacted
			}
			for i := range all {
				v := &all[i]
				goes := v.Mod <= compacted && v.Tombstone || i+1 < len(all) && all[i+1].Mod <= compacted
				if !has[key][v.Mod] && !goes && (w == e.leader || v.Mod <= resolved) {
					e.fatal("%s: range %s of %s is resolved up to %d, compacted %d, and lacks %s", e.name(w), r.id, span, resolved, compacted, versionText(v))
				}
			}
		}
	}
}

// someRevision is one that the key has or had, or none.
func (m *elasticModel) someRevision(e *elastic, key []byte) keyspace.Revision {
	all := m.versions[string(key)]
	if len(all) == 0 || e.one(4) {
		return 0
	}
	return all[max(0, len(all)-1-e.rng.IntN(4)/3)].Mod
}

// at returns the key's version at a revision, nil where it is not there.
func (m *elasticModel) at(key string, rev keyspace.Revision) *mvcc.Version {
	all := m.versions[key]
	i := len(all)
	for i > 0 && all[i-1].Mod > rev {
		i--
	}
	if i == 0 || all[i-1].Tombstone {
		return nil
	}
	return &all[i-1]
}

// keys are those that ever were, in order.
func (m *elasticModel) keys() []string { return slices.Sorted(maps.Keys(m.versions)) }

// state prints a span as it was at a revision.
func (m *elasticModel) state(s keyspace.Span, rev keyspace.Revision) (text string) {
	for _, key := range m.keys() {
		if v := m.at(key, rev); v != nil && s.Contains([]byte(key)) {
			text += fmt.Sprintf("%s@%d=%s ", key, v.Mod, v.Value)
		}
	}
	return text
}

// events prints the versions of a span from one revision to another.
func (m *elasticModel) events(s keyspace.Span, from, to keyspace.Revision) (text string) {
	var all []mvcc.Version
	for _, key := range m.keys() {
		for _, v := range m.versions[key] {
			if s.Contains([]byte(key)) && v.Mod >= from && v.Mod <= to {
				all = append(all, v)
			}
		}
	}
	slices.SortFunc(all, func(a, b mvcc.Version) int {
		return cmp.Or(cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub), bytes.Compare(a.Key, b.Key))
	})
	for i := range all {
		text += versionText(&all[i]) + " "
	}
	return text
}

// read notes the answer to a read.
func (m *elasticModel) read(r elasticRead, a *rangeapi.Response) {
	o := a.Op.(*pb.RangeResponse)
	r.at = keyspace.Revision(o.Header.Revision)
	for _, kv := range o.Kvs {
		r.got += fmt.Sprintf("%s@%d=%s ", kv.Key, kv.ModRevision, kv.Value)
	}
	m.reads = append(m.reads, r)
}

// tombstones counts those of a revision in a span.
func (m *elasticModel) tombstones(s keyspace.Span, rev keyspace.Revision) (n int64) {
	for key, all := range m.versions {
		if s.Contains([]byte(key)) && slices.ContainsFunc(all, func(v mvcc.Version) bool { return v.Mod == rev && v.Tombstone }) {
			n++
		}
	}
	return n
}
