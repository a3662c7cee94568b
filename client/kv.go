package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"
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

// Watch yields the changes of a key or span, in the order of their revisions and each once, also where nodes and connections are
// lost meanwhile. It begins at the request's start revision, or with what comes next if that is 0. Of the request it takes key,
// range_end, start_revision, filters and prev_kv.
//
// It ends with the caller's loop, or behind the first error. Where the next changes were compacted, that is rpctypes.ErrCompacted.
// Else it is the context's, [ErrClosed], or a refusal of the node's. Changes that the loop has not taken wait in memory.
func (c *Client) Watch(ctx context.Context, r *pb.WatchCreateRequest) iter.Seq2[*mvccpb.Event, error] {
	return func(yield func(*mvccpb.Event, error) bool) {
		next, on := r.GetStartRevision(), ctx
		for pause := leastPause; ; pause = min(2*pause, mostPause) {
			began := next
			err := c.watch(on, r, &next, yield)
			switch {
			case errors.Is(err, errLeft):
				return
			case ctx.Err() != nil:
				err = ctx.Err()
			case c.ctx.Err() != nil:
				err = ErrClosed
			case err == nil, mayPass(err), c.etcd.Username != "" && isOldToken(err):
				if isOldToken(err) {
					// Watches share a stream, with the token that has opened it, as long as their metadata are the same.
					on = metadata.AppendToOutgoingContext(ctx, "skein-watch", strconv.FormatUint(c.tags.Add(1), 10))
				}
				if next != began {
					pause = leastPause
				}
				select {
				case <-time.After(pause):
				case <-ctx.Done():
				case <-c.ctx.Done():
				}
				continue
			}
			yield(nil, err)
			return
		}
	}
}

// errLeft says that the loop around a Watch has been left.
var errLeft = errors.New("client: the loop has been left")

// watch yields changes until its watch ends, which goes on through most losses by itself. next is the revision of the first change that
// is not yielded, 0 for those to come.
func (c *Client) watch(ctx context.Context, r *pb.WatchCreateRequest, next *int64, yield func(*mvccpb.Event, error) bool) error {
	// A node that is cut off from the others says so, rather than nothing.
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	// By the notices of progress a watch that has nothing to yield is not behind a compaction all the same.
	opts := []clientv3.OpOption{clientv3.WithRev(*next), clientv3.WithCreatedNotify(), clientv3.WithProgressNotify()}
	if end := r.GetRangeEnd(); len(end) > 0 {
		opts = append(opts, clientv3.WithRange(string(end)))
	}
	if r.GetPrevKv() {
		opts = append(opts, clientv3.WithPrevKV())
	}
	for _, f := range r.GetFilters() {
		switch f {
		case pb.WatchCreateRequest_NOPUT:
			opts = append(opts, clientv3.WithFilterPut())
		case pb.WatchCreateRequest_NODELETE:
			opts = append(opts, clientv3.WithFilterDelete())
		}
	}
	for resp := range c.etcd.Watch(ctx, string(r.GetKey()), opts...) {
		if err := resp.Err(); err != nil {
			if resp.CompactRevision > 0 {
				return fmt.Errorf("client: watch from revision %d, and all before %d is compacted: %w", *next, resp.CompactRevision, err)
			}
			return refusalOf(err)
		}
		if resp.Created && *next == 0 {
			*next = resp.Header.GetRevision() + 1
		}
		if resp.IsProgressNotify() {
			*next = max(*next, resp.Header.GetRevision()+1)
		}
		for _, e := range resp.Events {
			if e.Kv.GetModRevision() < *next {
				// etcd's client resumes a watch from 0 at the revision at which it was created, rather than behind it.
				continue
			}
			if !yield(e, nil) {
				return errLeft
			}
		}
		if n := len(resp.Events); n > 0 { // all events of a revision come together
			*next = max(*next, resp.Events[n-1].Kv.GetModRevision()+1)
		}
	}
	return nil
}

// refusalOf returns the error of a watch in the words of etcd's client, which has that of a refused creation as text alone:
// rpc error: code = Unauthenticated desc = etcdserver: invalid auth token.
func refusalOf(err error) error {
	const before = "desc = "
	text := err.Error()
	if i := strings.LastIndex(text, before); i >= 0 {
		if known := rpctypes.Error(errors.New(text[i+len(before):])); errors.As(known, new(rpctypes.EtcdError)) {
			return known
		}
	}
	return err
}
