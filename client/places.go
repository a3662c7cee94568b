package client

import (
	"bytes"
	"net/url"
	"slices"
	"sort"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/api/pipepb"
)

// place says that the keys of a span are led by a node, as another node has said. It need not be true any more.
type place struct {
	start, end []byte // an empty end is none
	by         *leader
}

// places are spans that do not overlap, in their order.
type places []place

// mostPlaces bounds the places that a client remembers. A node sends none of more than 4 KiB, so they take 64 MiB at most, and most take far
// less.
const mostPlaces = 1 << 14

// find returns the place of a key, nil if there is none.
func (p places) find(key []byte) *place {
	i := p.after(key) - 1
	if i < 0 || len(p[i].end) > 0 && bytes.Compare(p[i].end, key) <= 0 {
		return nil
	}
	return &p[i]
}

// after returns the index of the first place that begins behind a key.
func (p places) after(key []byte) int {
	return sort.Search(len(p), func(i int) bool { return bytes.Compare(p[i].start, key) > 0 })
}

// put takes in a place, for all that overlap it, and for one far away if there are too many. That of a single key is passed over then:
// it would help few operations, and spans would make room for it.
func (p *places) put(n place) {
	all := *p
	lo := all.after(n.start)
	if lo > 0 && (len(all[lo-1].end) == 0 || bytes.Compare(all[lo-1].end, n.start) > 0) {
		lo--
	}
	hi := len(all)
	if len(n.end) > 0 {
		hi = sort.Search(len(all), func(i int) bool { return bytes.Compare(all[i].start, n.end) >= 0 })
	}
	if len(all) >= mostPlaces && lo >= hi && isOneKey(n) {
		return
	}
	all = slices.Replace(all, lo, max(lo, hi), n)
	if len(all) > mostPlaces {
		i := (lo + len(all)/2) % len(all)
		all = slices.Delete(all, i, i+1)
	}
	*p = all
}

// isOneKey says whether a place is of a single key.
func isOneKey(p place) bool {
	end := len(p.end) - 1
	return end == len(p.start) && p.end[end] == 0 && bytes.HasPrefix(p.end, p.start)
}

// remove forgets the place of a key.
func (p *places) remove(key []byte) {
	if p.find(key) != nil {
		i := p.after(key)
		*p = slices.Delete(*p, i-1, i)
	}
}

// keyOf returns the key by whose leader an operation is served best, nil if any node is as good. A transaction is served by
// the leader of its first key, which has all of it in most cases.
func keyOf(request any) []byte {
	switch r := request.(type) {
	case *pb.RangeRequest:
		if r.GetSerializable() {
			return nil
		}
		return r.GetKey()
	case *pb.PutRequest:
		return r.GetKey()
	case *pb.DeleteRangeRequest:
		return r.GetKey()
	case *pipepb.CompareAndPut:
		return r.GetPut().GetKey()
	case *pb.TxnRequest:
		if all := r.GetCompare(); len(all) > 0 {
			return all[0].GetKey()
		}
		for _, branch := range [2][]*pb.RequestOp{r.GetSuccess(), r.GetFailure()} {
			if len(branch) > 0 {
				op := branch[0]
				return slices.Concat(op.GetRequestRange().GetKey(), op.GetRequestPut().GetKey(), op.GetRequestDeleteRange().GetKey()) // one has it
			}
		}
	}
	return nil
}

// follower returns which URLs of nodes a client uses that is configured so: those with TLS, if it reaches its endpoints with TLS.
// Else a node, or who pretends to be one, could have it send its token in the clear. It is nil, for none, if all endpoints are sockets of
// this machine: its token has left on no network.
func follower(cfg *clientv3.Config) func(string) bool {
	if !slices.ContainsFunc(cfg.Endpoints, func(e string) bool { return !strings.HasPrefix(e, "unix:") && !strings.HasPrefix(e, "unixs:") }) {
		return nil
	}
	scheme := "http"
	if cfg.TLS != nil || slices.ContainsFunc(cfg.Endpoints, func(e string) bool { return strings.HasPrefix(e, "https:") || strings.HasPrefix(e, "unixs:") }) {
		scheme = "https"
	}
	return func(s string) bool {
		u, err := url.Parse(s)
		return err == nil && u.Scheme == scheme && u.Host != ""
	}
}
