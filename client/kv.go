package client

import (
	"context"
	"iter"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
)

// Get reads a key, linearizably. The response has no pair if the key is not there.
func (c *Client) Get(ctx context.Context, key string) (*pb.RangeResponse, error) {
	return Do(ctx, c, &pb.RangeRequest{Key: []byte(key)}).Range()
}

// Put stores a key. For a lease and other options there is [Do] with a PutRequest.
func (c *Client) Put(ctx context.Context, key, value string) (*pb.PutResponse, error) {
	return Do(ctx, c, &pb.PutRequest{Key: []byte(key), Value: []byte(value)}).Put()
}

// Delete deletes a key. For spans there is [Do] with a DeleteRangeRequest.
func (c *Client) Delete(ctx context.Context, key string) (*pb.DeleteRangeResponse, error) {
	return Do(ctx, c, &pb.DeleteRangeRequest{Key: []byte(key)}).Delete()
}

// CompareAndPut stores a key if it was last modified at a revision, 0 for a key that must not be there. If it was not, the
// response has not succeeded, and its only part reads the key.
func (c *Client) CompareAndPut(ctx context.Context, key, value string, modRevision int64) (*pb.TxnResponse, error) {
	put := &pb.PutRequest{Key: []byte(key), Value: []byte(value)}
	return Do(ctx, c, &pipepb.CompareAndPut{ModRevision: modRevision, Put: put}).Txn()
}

// Txn runs a transaction.
func (c *Client) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	return Do(ctx, c, r).Txn()
}

// Range reads a span page by page, in the order of the keys and all at one revision: that of the request, or the current
// one of the first page. It ends behind the first error. The request's limit is that of all pages together. Its order is
// not followed. The span's end is written as in etcd's requests.
func (c *Client) Range(ctx context.Context, r *pb.RangeRequest) iter.Seq2[*mvccpb.KeyValue, error] {
	return func(yield func(*mvccpb.KeyValue, error) bool) {
		page, left := proto.CloneOf(r), r.GetLimit()
		page.SortOrder, page.SortTarget = pb.RangeRequest_NONE, pb.RangeRequest_KEY
		for {
			page.Limit = c.pageKeys
			if left > 0 {
				page.Limit = min(page.Limit, left)
			}
			resp, err := Do(ctx, c, page).Range()
			if err != nil {
				yield(nil, err)
				return
			}
			for _, kv := range resp.GetKvs() {
				if !yield(kv, nil) {
					return
				}
			}
			n := int64(len(resp.GetKvs()))
			if left -= n; !resp.GetMore() || n == 0 || left == 0 {
				return
			}
			page = proto.CloneOf(page) // the one before may be under way still, for nobody
			page.Key = slices.Concat(resp.GetKvs()[n-1].GetKey(), []byte{0})
			if page.Revision == 0 {
				page.Revision = resp.GetHeader().GetRevision()
			}
		}
	}
}
