package client_test

import (
	"context"
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/client"
	"github.com/skeindb/skein/embedtest"
)

// TestExample is the example of docs/PIPE.md and of a program's first steps: a put, many without waiting, pages, and a watch.
func TestExample(t *testing.T) {
	endpoints := embedtest.New(t).Endpoints()
	if err := firstSteps(t.Context(), endpoints); err != nil {
		t.Error(err)
	}
}

func firstSteps(ctx context.Context, endpoints []string) error {
	c, err := client.Open(ctx, client.Config{Etcd: clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop()}})
	if err != nil {
		return err
	}
	defer c.Close()
	put, err := c.Put(ctx, "greeting", "hello")
	if err != nil {
		return err
	}
	// A hundred puts under way at the same time.
	var all []*client.Future
	for i := range 100 {
		all = append(all, client.Do(ctx, c, &pb.PutRequest{Key: fmt.Appendf(nil, "job/%03d", i), Value: []byte("new")}))
	}
	for _, f := range all {
		if _, err := f.Put(); err != nil {
			return err
		}
	}
	n := 0
	for kv, err := range c.Range(ctx, &pb.RangeRequest{Key: []byte("job/"), RangeEnd: []byte("job0")}) {
		if err != nil {
			return err
		}
		n += len(kv.GetValue())
	}
	if n != 300 {
		return fmt.Errorf("the jobs have %d bytes", n)
	}
	// A watch from the first put on. It goes on where a node is lost, and ends with the loop.
	for event, err := range c.Watch(ctx, &pb.WatchCreateRequest{Key: []byte("greeting"), StartRevision: put.GetHeader().GetRevision()}) {
		if err != nil {
			return err
		}
		if got := string(event.GetKv().GetValue()); got != "hello" {
			return fmt.Errorf("the event has %q", got)
		}
		break
	}
	return nil
}
