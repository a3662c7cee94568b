package judge

import (
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// LeaseOf returns the lease of an operation. It is 0 for an operation on keys or on all
// leases, and for an unanswered grant whose id the node chooses.
func LeaseOf(o *Op) int64 {
	switch r := o.Request.(type) {
	case *pb.LeaseGrantRequest:
		if a, ok := o.Response.(*pb.LeaseGrantResponse); ok {
			return a.GetID()
		}
		return r.GetID()
	case *pb.LeaseRevokeRequest:
		return r.GetID()
	case *pb.LeaseKeepAliveRequest:
		return r.GetID()
	case *pb.LeaseTimeToLiveRequest:
		return r.GetID()
	}
	return 0
}

// onKeys are the operations on keys.
func onKeys(ops []*Op) []*Op {
	return slices.DeleteFunc(slices.Clone(ops), func(o *Op) bool {
		switch o.Request.(type) {
		case *pb.LeaseLeasesRequest, *pb.LeaseGrantRequest:
			return true
		}
		return LeaseOf(o) != 0
	})
}

// endOf returns the lease whose keys these events delete, all of them and nothing else;
// otherwise 0.
func endOf(now *Model, events []Version) int64 {
	if len(events) == 0 {
		return 0
	}
	id := now.keys[events[0].Key].GetLease()
	if id == 0 {
		return 0
	}
	if _, _, d := now.Run(&pb.LeaseRevokeRequest{ID: id}, events[0].Mod); !slices.Equal(d, events) {
		return 0
	}
	return id
}

// granted returns the operations that have granted a lease, or may have. An unanswered
// grant whose id the node chooses has granted none that anybody knows.
func granted(ops []*Op) map[int64]*Op {
	by := map[int64]*Op{}
	for _, o := range ops {
		if _, ok := o.Request.(*pb.LeaseGrantRequest); ok && o.Outcome != Refused && LeaseOf(o) != 0 {
			by[LeaseOf(o)] = o
		}
	}
	return by
}

// attached returns the lease to which an operation attaches keys, 0 for none. No
// operation has two.
func attached(o *Op) int64 {
	switch r := o.Request.(type) {
	case *pb.PutRequest:
		return r.GetLease()
	case *pb.TxnRequest:
		for _, op := range r.GetSuccess() {
			if id := op.GetRequestPut().GetLease(); id != 0 {
				return id
			}
		}
	}
	return 0
}

// leasedKeys are the keys of all attempts to attach to a lease.
func leasedKeys(ops []*Op) map[string]bool {
	keys := map[string]bool{}
	for _, o := range ops {
		switch r := o.Request.(type) {
		case *pb.PutRequest:
			if r.GetLease() != 0 {
				keys[string(r.GetKey())] = true
			}
		case *pb.TxnRequest:
			for _, op := range r.GetSuccess() {
				if p := op.GetRequestPut(); p.GetLease() != 0 {
					keys[string(p.GetKey())] = true
				}
			}
		}
	}
	return keys
}

// compactedAt returns the revisions of the compactions that may have happened.
func compactedAt(ops []*Op) map[int64]bool {
	at := map[int64]bool{}
	for _, o := range ops {
		if r, ok := o.Request.(*pb.CompactionRequest); ok && o.Outcome != Refused {
			at[r.GetRevision()] = true
		}
	}
	return at
}

// Covers says whether etcd's pair holds the key.
func Covers(start, end []byte, key string) bool {
	switch {
	case len(end) == 0:
		return string(start) == key
	case len(end) == 1 && end[0] == 0:
		return key >= string(start)
	}
	return key >= string(start) && key < string(end)
}
