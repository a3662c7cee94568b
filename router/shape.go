package router

import (
	"bytes"
	"math"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// clip returns the request for a part of its span.
func clip(req *pb.RangeRequest, span keyspace.Span) *pb.RangeRequest {
	c := &pb.RangeRequest{
		Key: span.Start, RangeEnd: span.End,
		Limit: req.GetLimit(), Revision: req.GetRevision(),
		SortOrder: req.GetSortOrder(), SortTarget: req.GetSortTarget(),
		Serializable: req.GetSerializable(), KeysOnly: req.GetKeysOnly(), CountOnly: req.GetCountOnly(),
		MinModRevision: req.GetMinModRevision(), MaxModRevision: req.GetMaxModRevision(),
		MinCreateRevision: req.GetMinCreateRevision(), MaxCreateRevision: req.GetMaxCreateRevision(),
	}
	if len(c.Key) == 0 {
		c.Key = []byte{0}
	}
	if len(c.RangeEnd) == 0 {
		c.RangeEnd = []byte{0}
	} else if bytes.Equal(keyspace.Next(c.Key), c.RangeEnd) {
		c.RangeEnd = nil
	}
	return c
}

// maxLimit cannot be raised by one.
const maxLimit = math.MaxInt64

// byKeyUp says whether the answer is in key order, as ranges hold keys.
func byKeyUp(req *pb.RangeRequest) bool {
	return req.GetSortTarget() == pb.RangeRequest_KEY && req.GetSortOrder() != pb.RangeRequest_DESCEND
}

// byKeyDown says whether the answer is in reverse key order.
func byKeyDown(req *pb.RangeRequest) bool {
	return req.GetSortTarget() == pb.RangeRequest_KEY && req.GetSortOrder() == pb.RangeRequest_DESCEND
}

func filtered(req *pb.RangeRequest) bool {
	return req.GetMinModRevision() != 0 || req.GetMaxModRevision() != 0 ||
		req.GetMinCreateRevision() != 0 || req.GetMaxCreateRevision() != 0
}

// unsorted returns the request for the ranges, from whose keys [finish] makes the answer.
func unsorted(req *pb.RangeRequest) *pb.RangeRequest {
	if byKeyUp(req) {
		return req
	}
	scan := clip(req, keyspace.Span{})
	scan.SortTarget, scan.SortOrder = pb.RangeRequest_KEY, pb.RangeRequest_NONE
	scan.KeysOnly = req.GetKeysOnly() && req.GetSortTarget() != pb.RangeRequest_VALUE
	switch {
	case req.GetSortOrder() != pb.RangeRequest_NONE || filtered(req):
		scan.Limit = 0
	case scan.Limit > 0 && scan.Limit < maxLimit:
		// With a target and no order, etcd sorts only what its scan has found: as many keys as the
		// limit, and one more.
		scan.Limit++
	}
	return scan
}

// finish applies to the keys of all ranges what [unsorted] has left out.
func finish(req *pb.RangeRequest, resp *pb.RangeResponse) {
	rangeapi.SortKeys(req, resp.Kvs)
	resp.More = false
	if l := req.GetLimit(); l > 0 && int64(len(resp.Kvs)) > l {
		clear(resp.Kvs[l:])
		resp.Kvs, resp.More = resp.Kvs[:l], true
	}
	if req.GetKeysOnly() {
		for _, kv := range resp.Kvs {
			kv.Value = nil
		}
	}
}

func header(rev keyspace.Revision) *pb.ResponseHeader {
	return &pb.ResponseHeader{Revision: int64(rev)}
}
