package console

import (
	"context"
	"net/http"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

const (
	// historyPage bounds the versions of one answer, and leasesPage its leases: each takes a call.
	historyPage = 20
	leasesPage  = 50
	// shownBytes is how much of each version the history shows, and shownKeys how many keys of a lease.
	shownBytes = 4 << 10
	shownKeys  = 20
)

// version is a value that a key has had.
type version struct {
	ModRevision    int64 `json:"mod_revision"`
	CreateRevision int64 `json:"create_revision"`
	Version        int64 `json:"version"`
	Lease          int64 `json:"lease,string"`
	// Value is its beginning, and Bytes what it has in all.
	Value []byte `json:"value"`
	Bytes int    `json:"bytes"`
}

// serveHistory answers with the versions that a key has had, the newest first: from its present life on back to its
// creation, or to the compaction. Before that the store does not tell where the next one is.
func (a *api) serveHistory(r *http.Request, body []byte) (any, error) {
	var q struct {
		Key []byte
		// Revision is where to begin, 0 is now.
		Revision int64
	}
	if err := read(body, &q); err != nil {
		return nil, err
	}
	out := struct {
		Versions []version `json:"versions"`
		// End says why there are no more: created, compacted or absent, or more if there are.
		End string `json:"end"`
		// Next is the revision from which there are more.
		Next int64 `json:"next"`
	}{Versions: []version{}, End: "more"}
	ctx, cancel := context.WithTimeout(r.Context(), lookTime)
	defer cancel()
	for at := q.Revision; out.End == "more" && len(out.Versions) < historyPage; at = out.Next {
		resp, err := a.kv.Range(ctx, &pb.RangeRequest{Key: q.Key, Revision: at})
		switch {
		case rpctypes.Error(err) == rpctypes.ErrCompacted: //nolint:errorlint // etcd's value, which Error returns unwrapped
			out.End = "compacted"
			return out, nil
		case err != nil:
			return nil, err
		case len(resp.GetKvs()) == 0:
			out.End = "absent"
			return out, nil
		}
		v := versionOf(resp.GetKvs()[0])
		out.Versions = append(out.Versions, v)
		out.Next = v.ModRevision - 1
		if v.Version == 1 {
			out.End = "created"
		}
	}
	return out, nil
}

func versionOf(kv *mvccpb.KeyValue) version {
	value := kv.GetValue()
	return version{
		ModRevision: kv.GetModRevision(), CreateRevision: kv.GetCreateRevision(), Version: kv.GetVersion(), Lease: kv.GetLease(),
		Value: value[:min(len(value), shownBytes)], Bytes: len(value),
	}
}

// leaseRow is a lease and what hangs on it.
type leaseRow struct {
	ID      int64    `json:"id,string"`
	TTL     int64    `json:"ttl"`
	Granted int64    `json:"granted"`
	Keys    [][]byte `json:"keys"`
	Count   int      `json:"count"`
	// Error says why there is nothing but its id.
	Error string `json:"error,omitempty"`
}

// serveLeases answers with a page of leases. Of those whose keys the sender may not read there is only the id.
func (a *api) serveLeases(r *http.Request, body []byte) (any, error) {
	var q struct{ Skip int }
	if err := read(body, &q); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), lookTime)
	defer cancel()
	l, err := a.leases.LeaseLeases(ctx, &pb.LeaseLeasesRequest{})
	if err != nil {
		return nil, err
	}
	all := l.GetLeases()
	from := min(max(q.Skip, 0), len(all))
	out := struct {
		Leases []leaseRow `json:"leases"`
		Total  int        `json:"total"`
	}{Leases: []leaseRow{}, Total: len(all)}
	for _, s := range all[from:min(from+leasesPage, len(all))] {
		row := leaseRow{ID: s.GetID()}
		t, err := a.leases.LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: s.GetID(), Keys: true})
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			_, f := failureOf(err)
			row.Error = f.Error
		case t.GetTTL() < 0:
			continue // it has ended meanwhile
		default:
			row.TTL, row.Granted, row.Count = t.GetTTL(), t.GetGrantedTTL(), len(t.GetKeys())
			row.Keys = t.GetKeys()[:min(len(t.GetKeys()), shownKeys)]
		}
		out.Leases = append(out.Leases, row)
	}
	return out, nil
}
