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

// What stands is counted at what it was measured at: a node of 2 GiB takes 10,000 connections, 100,000
// watchers of short keys and 100,000 replicas. Connections are bounded by files where those are fewer.
func TestStanding(t *testing.T) {
	s := NewStanding(2 << 30)
	if n, why := s.connections(FileBudget{Connections: 1 << 20}); n < 10_000 || n > 20_000 || !strings.Contains(why, "--memory-budget-bytes") {
		t.Errorf("%d connections: %s", n, why)
	}
	if n, why := s.connections(FileBudget{Connections: 300}); n != 300 || !strings.Contains(why, "ulimit") {
		t.Errorf("%d connections: %s", n, why)
	}
	if each := s.Watchers / 100_000; each < 1200 {
		t.Errorf("a watcher has %d bytes", each)
	}
}
