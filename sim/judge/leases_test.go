package judge

import (
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
)

// tell is an operation with an answer made by hand: with the model's revision, unless
// it is an error.
func (s *script) tell(req, resp proto.Message, err error) *Op {
	o := s.call(req)
	if err == nil {
		setRevision(resp, s.now.rev)
	}
	s.h.End(o, resp, err, false, s.at)
	return o
}

func (s *script) grant(id, ttl int64) {
	s.tell(&pb.LeaseGrantRequest{ID: id, TTL: ttl}, &pb.LeaseGrantResponse{ID: id, TTL: ttl}, nil)
}

func (s *script) renew(id, ttl int64) *Op {
	return s.tell(&pb.LeaseKeepAliveRequest{ID: id}, &pb.LeaseKeepAliveResponse{ID: id, TTL: ttl}, nil)
}

func (s *script) hasKeys(id int64, keys ...string) {
	r := &pb.LeaseTimeToLiveResponse{ID: id, TTL: 1, GrantedTTL: 2}
	for _, k := range keys {
		r.Keys = append(r.Keys, []byte(k))
	}
	s.tell(&pb.LeaseTimeToLiveRequest{ID: id, Keys: true}, r, nil)
}

// expire deletes the keys of a lease at a time, and somebody learns of it at once.
func (s *script) expire(id int64, at time.Duration) {
	s.apply(&pb.LeaseRevokeRequest{ID: id})
	s.at = at
	s.do(everything())
}

func leased(key string, id int64) *pb.PutRequest {
	return &pb.PutRequest{Key: []byte(key), Value: []byte(key + " of a lease"), Lease: id}
}

// leases is a correct history of two leases: the first lives until 3 s, the second
// until it is revoked.
func leases() *script {
	s := newScript()
	s.grant(1, 2)
	s.do(leased("l0", 1))
	s.do(leased("u0", 1))
	s.at = time.Second
	s.renew(1, 2)
	s.hasKeys(1, "l0", "u0")
	s.grant(2, 2)
	s.do(leased("c0", 2))
	s.do(leased("z0", 2))
	keep := put("c0", "mine")
	keep.IgnoreLease = true
	s.do(keep)
	s.lose(s.call(del("z0")), false)
	return s
}

// end lets both leases end as they should.
func (s *script) end() {
	s.at = 2 * time.Second
	s.do(&pb.LeaseRevokeRequest{ID: 2})
	s.tell(leased("x0", 2), nil, kverror.LeaseNotFound)
	s.expire(1, 3*time.Second)
	s.renew(1, 0)
	s.tell(&pb.LeaseTimeToLiveRequest{ID: 1}, &pb.LeaseTimeToLiveResponse{ID: 1, TTL: -1}, nil)
}

func TestGoodLeasesPass(t *testing.T) {
	s := leases()
	s.end()
	r := s.report()
	r.Drained = true
	if bad := Check(r); len(bad) != 0 {
		t.Fatalf("%s", strings.Join(bad, "\n"))
	}
	p, _ := checkReplay(r.History.Ops(), r.Versions, nil)
	if len(p.ends) != 2 || !p.ends[0].sure || !p.ends[1].sure {
		t.Fatalf("the ends are %+v", p.ends)
	}
}

// TestBadLeasesFail corrupts the history of leases in one way each, and names the check
// that must report it.
func TestBadLeasesFail(t *testing.T) {
	for _, c := range []struct {
		name, by string
		spoil    func(s *script)
	}{
		{"expired before its time", "lives until", func(s *script) {
			s.expire(1, 2900*time.Millisecond)
		}},
		{"not there before its time", "lives until", func(s *script) {
			s.at = 2900 * time.Millisecond
			s.renew(1, 0)
		}},
		{"refused before its time", "lives until", func(s *script) {
			s.tell(leased("x0", 1), nil, kverror.LeaseNotFound)
		}},
		{"a key that stays behind", "nobody asked", func(s *script) {
			s.apply(del("l0"))
		}},
		{"keys that go one after the other", "nobody asked", func(s *script) {
			s.apply(del("l0"))
			s.apply(del("u0"))
		}},
		{"keys that go together with others", "nobody asked", func(s *script) {
			s.apply(&pb.DeleteRangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
		}},
		{"a key attached after the end", "this is attached", func(s *script) {
			s.end()
			s.lose(s.call(leased("x0", 1)), true)
		}},
		{"a put answered after the revoke was", "is there after its end", func(s *script) {
			s.end()
			s.do(leased("x0", 2))
		}},
		{"renewed after its end", "is there after its end", func(s *script) {
			s.end()
			s.renew(1, 2)
		}},
		{"revoked later than answered", "at the revision of its end", func(s *script) {
			s.tell(&pb.LeaseRevokeRequest{ID: 2}, &pb.LeaseRevokeResponse{}, nil)
			s.apply(&pb.LeaseRevokeRequest{ID: 2})
		}},
		{"revoked, and a key is read", "has keys after its end", func(s *script) {
			s.tell(&pb.LeaseRevokeRequest{ID: 2}, &pb.LeaseRevokeResponse{}, nil)
			s.do(everything())
		}},
		{"a key without a lease in the end", "no lease is left", func(s *script) {
			s.end()
			s.grant(3, 2)
			s.do(leased("x0", 3))
		}},
		{"a lease that nobody was granted", "nobody asked", func(s *script) {
			s.do(leased("x0", 7))
			s.apply(&pb.LeaseRevokeRequest{ID: 7})
		}},
		{"a key that is not named", "is answered wrong", func(s *script) { s.hasKeys(1, "l0") }},
		{"a key that is named and never was there", "is answered wrong", func(s *script) { s.hasKeys(1, "l0", "u0", "x0") }},
		{"an id granted twice", "is granted twice", func(s *script) { s.grant(1, 2) }},
		{"an id granted twice at a time", "is granted twice", func(s *script) {
			a, b := s.call(&pb.LeaseGrantRequest{TTL: 2}), s.call(&pb.LeaseGrantRequest{ID: 9, TTL: 2})
			for _, o := range []*Op{a, b} {
				s.h.End(o, &pb.LeaseGrantResponse{ID: 9, TTL: 2}, nil, false, s.at)
			}
		}},
		{"there long after it must have expired", "later", func(s *script) {
			s.at = 3*time.Second + 2*lateBy
			s.do(leased("x0", 1))
		}},
		{"another lease in an answer", "replay", func(s *script) {
			o := s.do(get("l0"))
			o.Response = proto.Clone(o.Response)
			o.Response.(*pb.RangeResponse).Kvs[0].Lease = 2
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := leases()
			c.spoil(s)
			r := s.report()
			r.Drained = true
			found, _ := checkAnswers(r)
			if bad := strings.Join(found, "\n"); !strings.Contains(bad, c.by) {
				t.Fatalf("no %q in the findings:\n%s", c.by, bad)
			}
		})
	}
}

// TestGrantedAgain: the id of a lease that has ended, or was perhaps revoked, may be
// granted again.
func TestGrantedAgain(t *testing.T) {
	s := leases()
	s.end()
	s.grant(1, 2)
	s.grant(2, 2)
	s.lose(s.call(&pb.LeaseRevokeRequest{ID: 2}), false)
	s.grant(2, 2)
	// Two clients grant one id at the same time. The first grant is answered last, after the
	// other lease has expired. Its holder has the lease from then on.
	slow, quick := s.call(&pb.LeaseGrantRequest{ID: 9, TTL: 2}), s.call(&pb.LeaseGrantRequest{ID: 9, TTL: 2})
	s.h.End(quick, &pb.LeaseGrantResponse{ID: 9, TTL: 2}, nil, false, s.at)
	s.at += 3 * time.Second
	s.h.End(slow, &pb.LeaseGrantResponse{ID: 9, TTL: 2}, nil, false, s.at)
	s.renew(9, 2)
	if bad := checkGrants(s.h.Ops()); len(bad) != 0 {
		t.Fatalf("%s", strings.Join(bad, "\n"))
	}
}

// TestUnsureEnd: a possible effect of a lost delete is not held against the lease.
func TestUnsureEnd(t *testing.T) {
	s := newScript()
	s.grant(1, 2)
	s.do(leased("l0", 1))
	s.lose(s.call(del("l0")), true)
	s.do(everything())
	s.do(leased("u0", 1))
	if bad := Check(s.report()); len(bad) != 0 {
		t.Fatalf("%s", strings.Join(bad, "\n"))
	}
}

// TestUnknownGrantEndsNothing: an unanswered grant whose id the node chooses is no
// lease, so a lost write cannot count as its end.
func TestUnknownGrantEndsNothing(t *testing.T) {
	s := newScript()
	s.lose(s.call(&pb.LeaseGrantRequest{TTL: 2}), false)
	s.lose(s.call(&pb.PutRequest{Key: []byte("l0"), Value: []byte("lost")}), true)
	for range 20 { // so that enough is known
		s.do(everything())
	}
	r := s.report()
	if _, p := checkAnswers(r); p == nil || len(p.ends) != 0 {
		t.Fatalf("ends of leases: %+v", p)
	}
	if bad := Check(r); len(bad) != 0 {
		t.Fatalf("%s", strings.Join(bad, "\n"))
	}
}
