package conformance

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/protobuf/proto"
)

// group is a set of keys that calls mostly use together. The cluster splits between
// groups and within them, and some calls use keys of several.
type group struct {
	prefix string
	// end is behind every key of the group and not above the next one's prefix. It is ""
	// for the last group, which extends to the end of the keyspace.
	end string
}

// groups are ascending. The first has the smallest possible keys, the last the largest.
var groups = []group{
	{"\x00", "\x01"},
	{"a/", "a0"},
	{"b/", "b0"},
	{"c/", "c0"},
	{"d/", "d0"},
	{"e/", "e0"},
	{"f/", "f0"},
	{"g/", "g0"},
	{"h/", "h0"},
	{"\xff", ""},
}

// suffixes make the keys of a group. They are few, so that calls meet, and they are
// unusual.
var suffixes = []string{"", "\x00", "\x00\x00", "0", "1", "10", "2", "3", "\xff", "\xff\xff"}

// source makes random requests for the generators. It remembers the stores' content
// from the answers, so that requests hit existing data. The seed and the answers
// determine its output.
type source struct {
	*rand.Rand
	// revision is the highest in any answer; compacted is that of the last accepted
	// compaction.
	revision, compacted int64
	// known is the last known state of each key.
	known map[string]*mvccpb.KeyValue
	// twice are the revisions of transactions that may have written a key more than
	// once.
	twice map[int64]bool
	// leases are those granted and not revoked.
	leases []int64
	// held are the keys of the last acquired locks, leaders those of won campaigns.
	held    [][]byte
	leaders []*v3electionpb.LeaderKey
	// page is the next page of the list that is read by pages, nil for none.
	page *pb.RangeRequest
	// kinds are those of the calls, and granted the permissions that were granted last.
	kinds   []*kind
	granted []*authpb.Permission
	// passwords are those of users, and failures how many logins of each have failed.
	passwords map[string]string
	failures  map[string]int
	// steady leaves out writes that the store may refuse for its content: a refusal has
	// no revision that shows its place.
	steady bool
	// hot is the group of most calls at the moment, for left calls.
	hot, left int
}

func newSource(seed uint64) *source {
	return &source{
		Rand: rand.New(rand.NewPCG(seed, 0x736b65696e)), revision: 1,
		known: make(map[string]*mvccpb.KeyValue), twice: make(map[int64]bool), kinds: kinds,
	}
}

// chance is true in one of n cases.
func (s *source) chance(n int) bool { return s.IntN(n) == 0 }

func pick[T any](s *source, of []T) T { return of[s.IntN(len(of))] }

// observe learns from an answer.
func (s *source) observe(c *call, a answer) {
	if h, ok := a.response.(interface{ GetHeader() *pb.ResponseHeader }); ok && a.response != nil {
		s.revision = max(s.revision, h.GetHeader().GetRevision())
	}
	if c.kind.name == pageName {
		s.observePage(a)
	}
	switch r := a.response.(type) {
	case *pb.RangeResponse:
		for _, kv := range r.GetKvs() {
			s.known[string(kv.GetKey())] = kv
		}
	case *pb.PutResponse:
		s.put(c.request.(*pb.PutRequest))
	case *pb.TxnResponse:
		t := c.request.(*pb.TxnRequest)
		if writesTwice(t) {
			s.twice[r.GetHeader().GetRevision()] = true
		}
		ops := t.GetFailure()
		if r.GetSucceeded() {
			ops = t.GetSuccess()
		}
		for _, op := range ops {
			if p := op.GetRequestPut(); p != nil {
				s.put(p)
			}
		}
	case *pb.LeaseGrantResponse, *pb.LeaseRevokeResponse:
		s.observeLease(c, a)
	case *v3lockpb.LockResponse, *v3electionpb.CampaignResponse, *v3electionpb.LeaderResponse:
		s.observeLock(a)
	case *pb.AuthRoleGrantPermissionResponse:
		s.granted = append(s.granted, c.request.(*pb.AuthRoleGrantPermissionRequest).GetPerm())
		s.granted = s.granted[max(0, len(s.granted)-heldMax):]
	case *pb.CompactionResponse:
		s.compacted = c.request.(*pb.CompactionRequest).GetRevision()
	}
}

func (s *source) put(p *pb.PutRequest) {
	old := s.known[string(p.GetKey())]
	kv := &mvccpb.KeyValue{
		Key: p.GetKey(), Value: p.GetValue(), ModRevision: s.revision,
		CreateRevision: old.GetCreateRevision(), Version: old.GetVersion() + 1,
	}
	if kv.CreateRevision == 0 {
		kv.CreateRevision = s.revision
	}
	s.known[string(p.GetKey())] = kv
}

// group returns the group of the next call.
func (s *source) group() int {
	if s.left--; s.left < 0 {
		s.hot, s.left = s.IntN(len(groups)), 10+s.IntN(40)
	}
	if s.chance(4) {
		return s.IntN(len(groups))
	}
	return s.hot
}

// key returns a key of the group.
func (s *source) key(g int) []byte {
	k := []byte(groups[g].prefix + pick(s, suffixes))
	if s.chance(400) {
		k = append(k, bytes.Repeat([]byte{'k'}, 1+s.IntN(32<<10))...)
	}
	return k
}

// writeKey returns a key of the group, or any.
func (s *source) writeKey(g int) []byte {
	if s.chance(4) {
		g = s.IntN(len(groups))
	}
	return s.key(g)
}

// writeSpan returns a key and a range_end in one of etcd's forms, mostly within the group.
func (s *source) writeSpan(g int) (key, end []byte) {
	if s.chance(8) {
		return s.anySpan(g)
	}
	key = s.key(g)
	switch s.IntN(10) {
	case 0, 1, 2, 3:
		return key, nil
	case 4, 5:
		end = s.key(g) // often below key, sometimes key itself
	case 6:
		end = append(slices.Clone(key), 0)
	case 7:
		end = slices.Clone(key)
	default:
		end = []byte(groups[g].end)
	}
	if last := groups[g].end == ""; last && len(end) == 0 || !last && string(end) == "\x00" {
		// All keys from key on: the last group needs that, and no other may have it.
		end = []byte{0}
		if !last {
			end = []byte(groups[g].end)
		}
	}
	return key, end
}

// anySpan returns a key and a range_end in one of etcd's forms, anywhere.
func (s *source) anySpan(g int) (key, end []byte) {
	key = s.key(g)
	switch s.IntN(8) {
	case 0, 1:
		return key, nil
	case 2:
		return key, []byte{0}
	case 3:
		return []byte{0}, []byte{0}
	case 4:
		return key, s.key(s.IntN(len(groups)))
	case 5:
		return []byte(groups[g].prefix), []byte(pick(s, groups[g:]).end)
	case 6:
		return []byte(groups[s.IntN(g+1)].prefix), key
	}
	return key, append(slices.Clone(key), 0)
}

// splitKey returns a key at which the cluster may be split, mostly one between two
// groups.
func (s *source) splitKey() []byte {
	if s.chance(3) {
		return []byte(groups[1+s.IntN(len(groups)-1)].prefix + pick(s, suffixes))
	}
	i := 1 + s.IntN(len(groups)-1)
	low, high := groups[i-1].end, groups[i].prefix
	switch s.IntN(4) {
	case 0:
		return []byte(high)
	case 1:
		return []byte(low)
	}
	k := append([]byte(low), byte(s.IntN(256)), byte(s.IntN(256)))
	if string(k) >= high {
		return []byte(high)
	}
	return k
}

var values = []string{"", "0", "1", "a", "b", "value", "\x00", "\xff\xfe"}

func (s *source) value() []byte {
	switch s.IntN(40) {
	case 0:
		return bytes.Repeat([]byte{'v'}, s.IntN(4<<10))
	case 1:
		return []byte{byte(s.IntN(256)), byte(s.IntN(256))}
	}
	return []byte(pick(s, values))
}

// etcd's default limits.
const (
	maxRequestBytes = 3 << 19
	// grpcOverheadBytes is how far a message may exceed the request's limit before gRPC
	// itself refuses it.
	grpcOverheadBytes = 512 << 10
	maxTxnOps         = 128
)

// fill pads a request by its last field's bytes to about one of the limits. pad sets a
// field to that many bytes.
func (s *source) fill(m proto.Message, pad func(n int)) {
	around := maxRequestBytes
	if s.chance(4) {
		around += grpcOverheadBytes
	}
	around += s.IntN(41) - 30
	pad(around)
	pad(around - (proto.Size(m) - around))
}

// explicit returns a revision for a read: mostly none.
func (s *source) explicit() int64 {
	if s.IntN(10) < 6 {
		return 0
	}
	return s.someRevision()
}

// someRevision returns a revision of the past, of the future, or an invalid one.
func (s *source) someRevision() int64 {
	switch s.IntN(16) {
	case 0:
		return s.compacted
	case 1:
		return s.compacted - 1
	case 2:
		return s.compacted + 1
	case 3:
		return s.revision
	case 4:
		if s.steady {
			return 1 << 40
		}
		return s.revision + 1 + int64(s.IntN(3))
	case 5:
		return pick(s, []int64{-1, -2, -100, 1, 2, math.MaxInt64, math.MinInt64, 1 << 40})
	case 6:
		return s.Int64N(s.revision + 1)
	}
	return s.compacted + s.Int64N(max(1, s.revision-s.compacted+1))
}

// compaction returns a revision to compact at that etcd 3.7.3 survives. A transaction
// that deletes a key and puts it again is fatal there: etcd removes the put, and stops
// at the next read of the key. A transaction that puts a key and deletes it is avoided
// too: etcd keeps only the delete, but not at once, so a watcher from there receives
// other events.
func (s *source) compaction() int64 {
	rev := s.someRevision()
	for s.twice[rev] {
		rev--
	}
	return rev
}

// near returns a number to compare with n, mostly n itself.
func (s *source) near(n int64) int64 {
	switch s.IntN(10) {
	case 0:
		return n + 1
	case 1:
		return n - 1
	case 2:
		return 0
	case 3:
		return pick(s, []int64{-1, math.MaxInt64, math.MinInt64, s.revision})
	}
	return n
}

// aKnown returns a known key, of the group if there is one.
func (s *source) aKnown(g int) *mvccpb.KeyValue {
	if kv, ok := s.known[groups[g].prefix+pick(s, suffixes)]; ok {
		return kv
	}
	return &mvccpb.KeyValue{CreateRevision: s.revision, ModRevision: s.revision, Version: 1}
}
