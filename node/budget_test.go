package node

import (
	"reflect"
	"strings"
	"testing"
)

// The parts of the budget add up to what it was made from, and none is empty.
func TestBudgetAddsUp(t *testing.T) {
	for _, total := range []int64{64 << 20, 256<<20 + 7, 1 << 30, 1<<40 + 99} {
		b := NewBudget(total)
		v := reflect.ValueOf(b)
		var sum int64
		for i := range v.NumField() {
			if v.Field(i).Int() <= 0 {
				t.Errorf("%d: %s is %d", total, v.Type().Field(i).Name, v.Field(i).Int())
			}
			sum += v.Field(i).Int()
		}
		if sum != total {
			t.Errorf("%d was divided into %d", total, sum)
		}
	}
}

// A large budget is the block cache's, where a larger share of others makes nothing better.
func TestLargeBudgetIsTheCaches(t *testing.T) {
	small, large := NewBudget(1<<30), NewBudget(16<<30)
	if small.Memtables > 256<<20 || large.Memtables != 256<<20 || large.WALCache != 128<<20 {
		t.Errorf("memtables of %d and %d bytes, a wal cache of %d", small.Memtables, large.Memtables, large.WALCache)
	}
	if part := large.BlockCache * 100 / (16 << 30); part < 30 {
		t.Errorf("the block cache has %d %% of 16 GiB", part)
	}
}

// A node of 2 GiB takes 10,000 connections, 2,000 pipes, 100,000 watchers of short keys and 100,000 replicas. Files
// bound the connections where they allow fewer.
func TestStanding(t *testing.T) {
	s := NewStanding(2 << 30)
	if n, why := s.connections(FileBudget{Connections: 1 << 20}); n < 10_000 || n > 20_000 || !strings.Contains(why, "--memory-budget-bytes") {
		t.Errorf("%d connections: %s", n, why)
	}
	if n, why := s.connections(FileBudget{Connections: 300}); n != 300 || !strings.Contains(why, "ulimit") {
		t.Errorf("%d connections: %s", n, why)
	}
	if n := s.pipes(); n < 2000 {
		t.Errorf("%d pipes", n)
	}
	if small, large := NewStanding(64<<20).pipes(), NewStanding(1<<40).pipes(); small < 32 || small > 256 || large != mostPipes {
		t.Errorf("%d pipes with the smallest budget, %d with the largest", small, large)
	}
	if each := s.Watchers / 100_000; each < 1200 {
		t.Errorf("a watcher has %d bytes", each)
	}
}

// What the bus may hold for all peers, with handlers and QUIC's windows, is within its share.
func TestBusBytes(t *testing.T) {
	b := NewBudget(2 << 30)
	if got := b.busBytes(3 << 19); got*2 > b.BusQueues || got < b.BusQueues/3 {
		t.Errorf("%d bytes of queues in a share of %d", got, b.BusQueues)
	}
	if got := NewBudget(64 << 20).busBytes(3 << 19); got != 24<<20 {
		t.Errorf("%d bytes of queues with the smallest budget", got)
	}
}

// A node with more replicas than its budget has room for keeps them, splits none, and has placement give
// it no more.
func TestFullOfReplicas(t *testing.T) {
	const ranges = 400
	memory := int64(64 << 20)
	bubble(t, 1, borders(ranges), func(o *Options) { o.MemoryBytes, o.WALSegmentBytes = memory, 4<<20 }, func(r *rig) {
		n := r.nodes[0]
		r.mustPut(n, keyOf(0), "x")
		if (measurer{n.core}).Full() || n.core.report().NoMemory {
			t.Fatal("it has memory for more")
		}
		r.stop(n)
		memory = 8 << 20
		r.start(n)
		r.mustPut(n, keyOf(0), "y")
		if got := len(n.core.shards.Replicas()); got != ranges {
			t.Errorf("%d replicas after the start", got)
		}
		n.disk.reserve(diskBytes / 20) // as ext4 does for root: nobody else has this room
		capacity, used := (measurer{n.core}).Disk()
		if !(measurer{n.core}).Full() || used == capacity || used < diskBytes/20 {
			t.Errorf("placement hears of %d of %d bytes", used, capacity)
		}
		if r := n.core.report(); !r.NoMemory || r.Capacity != capacity || r.Used != used {
			t.Errorf("who asks it hears of %d of %d bytes used, and placement of %d of %d; without memory: %t", r.Used, r.Capacity, used, capacity, r.NoMemory)
		}
	})
}
