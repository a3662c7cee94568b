package client_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/client"
	"github.com/skeindb/skein/embedtest"
)

// adder adds to a counter of its own key by CompareAndPut, one after the other.
type adder struct {
	key string
	// done are the additions that were acknowledged, unknown those of unknown fate.
	done, unknown int
}

// add adds until stop is closed. The value counts the additions that have happened; what one writes is read before it, so one
// that happened twice would be seen.
func (a *adder) add(ctx context.Context, t *testing.T, c *client.Client, stop <-chan struct{}) {
	t.Helper()
	var at int64
	for {
		select {
		case <-stop:
			return
		default:
		}
		got, err := c.CompareAndPut(ctx, a.key, "v", at)
		switch {
		case err == nil && got.GetSucceeded():
			a.done++
			at = got.GetHeader().GetRevision()
			continue
		case err == nil && a.unknown == 0:
			t.Errorf("%s was at revision %d, and is not any more: %v", a.key, at, got)
			return
		case errors.Is(err, client.ErrUnknownFate):
			a.unknown++
		}
		// Not applied, or not known: what is there says it.
		kv, err := a.stored(ctx, c)
		if err != nil {
			t.Error(err)
			return
		}
		at = kv.GetModRevision()
	}
}

// stored returns the key as it is, nil if it is not there. A node may say that it has no leader in time; that the read was lost
// with a node is no reason to fail.
func (a *adder) stored(ctx context.Context, c *client.Client) (*mvccpb.KeyValue, error) {
	for {
		r, err := c.Get(ctx, a.key)
		switch {
		case err == nil && len(r.GetKvs()) == 0:
			return nil, nil //nolint:nilnil // there is no such key
		case err == nil:
			return r.GetKvs()[0], nil
		case ctx.Err() != nil || errors.Is(err, client.ErrUnknownFate):
			return nil, fmt.Errorf("read %s: %w", a.key, err)
		}
	}
}

// TestNodeKilled: with a node killed and started again under load, nothing that was acknowledged is lost, and no change has
// happened twice.
func TestNodeKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("three nodes, and elections")
	}
	s := embedtest.New(t, embedtest.Nodes(3))
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	adders := make([]*adder, 24)
	// Each client is at one node only at first: the killed one has a third of them.
	clients := []*client.Client{open(t, at(s.Endpoints()...)), open(t, at(s.Endpoints()...)), open(t, at(s.Endpoints()...))}
	for i := range adders {
		adders[i] = &adder{key: fmt.Sprintf("%c/%d", 'a'+i, i)}
		wg.Go(func() { adders[i].add(ctx, t, clients[i%len(clients)], stop) })
	}
	for n := range 3 {
		time.Sleep(500 * time.Millisecond) // load before the kill
		s.Node(n).Kill()
		s.Node(n).Start()
	}
	close(stop)
	wg.Wait()
	done := 0
	for _, a := range adders {
		kv, err := a.stored(ctx, clients[0])
		must(t, err)
		if happened := int(kv.GetVersion()); happened < a.done || happened > a.done+a.unknown {
			t.Errorf("%s has changed %d times; %d were acknowledged and the fate of %d is unknown", a.key, kv.GetVersion(), a.done, a.unknown)
		}
		done += a.done
	}
	if done == 0 {
		t.Error("nothing was acknowledged")
	}
	for _, kvErr := range clients[0].Range(ctx, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")}) {
		must(t, kvErr)
	}
}
