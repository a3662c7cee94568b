package shard

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/transport"
)

// silentPeer accepts calls to node 2 and never answers; others are not reached.
type silentPeer struct{ calls chan keyspace.NodeID }

func (p silentPeer) Call(ctx context.Context, to keyspace.NodeID, _ transport.Method, _ []byte) ([]byte, error) {
	p.calls <- to
	if to != 2 {
		return nil, transport.ErrNoRoute
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (p silentPeer) OpenStream(context.Context, keyspace.NodeID, transport.Method, []byte) (transport.Stream, error) {
	return nil, transport.ErrNoRoute
}

// A peer that does not answer delays neither the child of a split nor, for long,
// replicas that other peers speak to.
func TestOpenerBesideASilentPeer(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		peer := silentPeer{make(chan keyspace.NodeID, 100)}
		w.store.admins.bus = peer
		w.serve(1, 5)
		for g := range 10 {
			w.store.Unknown(2, keyspace.RangeID(10+g).Group(), 1)
		}
		w.store.Unknown(3, keyspace.RangeID(20).Group(), 1)
		synctest.Wait()
		begin := time.Now()
		split := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: 5, Generation: 1})
		split = command.AppendSplit(split, &command.Split{Key: []byte("m"), Child: 2, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas})
		if err := w.groups.group(1).apply(raftgroup.Entry{Term: 5, Data: split}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if w.store.Replica(2) == nil {
			t.Error("the child waits for the answer of a peer")
		}
		var asked keyspace.NodeID
		for asked != 3 {
			asked = <-peer.calls
		}
		if d := time.Since(begin); d > 2*time.Second {
			t.Errorf("node 3 was asked after %v", d)
		}
	})
}
