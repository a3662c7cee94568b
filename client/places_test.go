package client

import (
	"bytes"
	"crypto/tls"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/api/pipepb"
)

// TestPlaces: what was put last counts, and what it overlaps is forgotten whole; a model of single keys says which.
func TestPlaces(t *testing.T) {
	const keys = 20
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var p places
		model := make([]*leader, keys)
		for range 30 {
			at, by := random.IntN(keys), &leader{}
			if random.IntN(4) == 0 {
				p.remove([]byte{byte(at)})
				model = slices.Clone(model)
				if gone := model[at]; gone != nil {
					for i := range model {
						if model[i] == gone {
							model[i] = nil
						}
					}
				}
				continue
			}
			end := at + 1 + random.IntN(keys-at)
			n := place{start: []byte{byte(at)}, end: []byte{byte(end)}, by: by}
			if end == keys {
				n.end = nil
			}
			p.put(n)
			for i := range model {
				if model[i] != nil && slices.Contains(model[at:end], model[i]) && (i < at || i >= end) {
					model[i] = nil
				}
			}
			for i := at; i < end; i++ {
				model[i] = by
			}
		}
		for i := range model {
			var got *leader
			if f := p.find([]byte{byte(i)}); f != nil {
				got = f.by
			}
			if got != model[i] {
				t.Fatalf("key %d is at %p, want %p: %v", i, got, model[i], p)
			}
		}
	}
}

// TestPlacesAreBounded: there are never more than the bound, and the newest is there. A single key makes room for itself only in the place
// that has it.
func TestPlacesAreBounded(t *testing.T) {
	var p places
	by := &leader{}
	key := func(i int) []byte { return []byte{byte(i >> 16), byte(i >> 8), byte(i)} }
	for i := range mostPlaces + 1000 {
		p.put(place{start: key(i), end: key(i + 1), by: by})
		if p.find(key(i)) == nil {
			t.Fatalf("place %d is not taken in", i)
		}
	}
	single := func(k []byte) bool {
		now := &leader{}
		p.put(place{start: k, end: append(slices.Clone(k), 0), by: now})
		f := p.find(k)
		return f != nil && f.by == now
	}
	if single([]byte("far away")) {
		t.Error("a single key is taken in for a span")
	}
	if !single(key(mostPlaces)) {
		t.Error("a single key that another place has is passed over")
	}
	if len(p) != mostPlaces {
		t.Errorf("%d places, want %d", len(p), mostPlaces)
	}
	if !slices.IsSortedFunc(p, func(a, b place) int { return bytes.Compare(a.start, b.start) }) {
		t.Error("they are not in order")
	}
}

// TestLeadersAreBounded: of nodes without a pipe no more are remembered than the bound, nor their places.
func TestLeadersAreBounded(t *testing.T) {
	c := noPipe("")
	c.follows = func(string) bool { return true }
	busy := &leader{node: 1, running: true}
	c.leaders[1] = busy
	c.places.put(place{start: []byte("busy"), end: []byte("busz"), by: busy})
	for i := range uint64(3 * mostLeaders) {
		key := []byte{byte(i >> 8), byte(i)}
		c.learn(&call{key: key}, &pipepb.Place{Node: i + 2, Key: key})
	}
	if len(c.leaders) > mostLeaders {
		t.Errorf("%d leaders", len(c.leaders))
	}
	for _, p := range c.places {
		if c.leaders[p.by.node] != p.by {
			t.Errorf("the place at %q is of a leader that is forgotten", p.start)
		}
	}
	if c.places.find([]byte("busy")) == nil {
		t.Error("a leader with a pipe is forgotten")
	}
}

// TestNodesDisagree: other URLs of a leader have it tried at once, and once only while nodes do not agree on them.
func TestNodesDisagree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := noPipe("")
		c.follows = func(string) bool { return true }
		say := func(url string) {
			c.learn(&call{key: []byte("k")}, &pipepb.Place{Node: 1, Key: []byte("k"), ClientUrls: []string{url}})
		}
		say("http://a")
		l := c.leaders[1]
		tries := 0
		for range 50 {
			for _, url := range []string{"http://b", "http://a"} {
				say(url)
				if !slices.Equal(l.urls, []string{url}) {
					t.Fatalf("the URLs are %v, want %s", l.urls, url)
				}
				if time.Now().After(l.retry) {
					tries++
					l.ended(false)
				}
			}
			time.Sleep(leastLeaderPause / 25)
		}
		// Two seconds have passed. Each try has a reset before it, or the pause behind a failure.
		if tries < 2 || tries > 4 {
			t.Errorf("%d tries", tries)
		}
	})
}

// TestPlacesThatCannotBe: a place that does not hold the key, or is of no node, is passed over.
func TestPlacesThatCannotBe(t *testing.T) {
	c := noPipe("")
	c.follows = func(string) bool { return true }
	for _, p := range []*pipepb.Place{
		{},
		{Node: 1},
		{Node: 1, Key: []byte("l")},
		{Node: 1, Key: []byte("l"), RangeEnd: []byte{0}},
		{Node: 1, Key: []byte("a"), RangeEnd: []byte("k")},
		{Node: 1, Key: []byte("z"), RangeEnd: []byte("a")},
		{Key: []byte("k")},
	} {
		c.learn(&call{key: []byte("k")}, p)
		if len(c.places) != 0 {
			t.Errorf("%v is taken in", p)
		}
	}
	for _, p := range []*pipepb.Place{
		{Node: 1, Key: []byte("k")}, {Node: 1, Key: []byte("k"), RangeEnd: []byte{0}}, {Node: 1, RangeEnd: []byte{0}}, {Node: 1, Key: []byte("a"), RangeEnd: []byte("l")},
	} {
		c.places = nil
		c.learn(&call{key: []byte("k")}, p)
		if len(c.places) != 1 {
			t.Errorf("%v is passed over", p)
		}
	}
}

// TestFollower: who reaches endpoints with TLS follows to no URL without, and who reaches them by no network to none.
func TestFollower(t *testing.T) {
	for i, c := range []struct {
		cfg         clientv3.Config
		http, https bool
	}{
		{clientv3.Config{Endpoints: []string{"a:1"}}, true, false},
		{clientv3.Config{Endpoints: []string{"http://a:1", "unix:x"}}, true, false},
		{clientv3.Config{Endpoints: []string{"a:1"}, TLS: &tls.Config{}}, false, true},
		{clientv3.Config{Endpoints: []string{"http://a:1"}, TLS: &tls.Config{}}, false, true},
		{clientv3.Config{Endpoints: []string{"http://a:1", "https://b:1"}}, false, true},
		{clientv3.Config{Endpoints: []string{"unixs:x", "a:1"}}, false, true},
		{clientv3.Config{Endpoints: []string{"unixs:x"}}, false, false},
		{clientv3.Config{Endpoints: []string{"unix:x", "unix:///y"}}, false, false},
		{clientv3.Config{Endpoints: []string{"unix:x"}, TLS: &tls.Config{}}, false, false},
	} {
		f := follower(&c.cfg)
		for url, want := range map[string]bool{
			"http://b:2": c.http, "https://b:2": c.https, "unix:x": false, "unixs:x": false, "b:2": false, "": false, "http:": false, "https:///": false, "ftp://b:2": false,
		} {
			if (f != nil && f(url)) != want {
				t.Errorf("case %d: %q is followed: %v", i, url, !want)
			}
		}
	}
}

// TestKeyOf: the key of each kind of request.
func TestKeyOf(t *testing.T) {
	k := []byte("k")
	read := &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: k}}}
	nested := &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{}}}
	for i, c := range []struct {
		request any
		want    string
	}{
		{&pb.RangeRequest{Key: k}, "k"},
		{&pb.RangeRequest{Key: k, Serializable: true}, ""},
		{&pb.PutRequest{Key: k}, "k"},
		{&pb.DeleteRangeRequest{Key: k}, "k"},
		{&pipepb.CompareAndPut{Put: &pb.PutRequest{Key: k}}, "k"},
		{&pipepb.CompareAndPut{}, ""},
		{&pb.TxnRequest{}, ""},
		{&pb.TxnRequest{Compare: []*pb.Compare{{Key: k}}, Success: []*pb.RequestOp{nested}}, "k"},
		{&pb.TxnRequest{Failure: []*pb.RequestOp{read}}, "k"},
		{&pb.TxnRequest{Success: []*pb.RequestOp{nested, read}}, ""},
	} {
		if got := keyOf(c.request); string(got) != c.want {
			t.Errorf("case %d: %q, want %q", i, got, c.want)
		}
	}
}
