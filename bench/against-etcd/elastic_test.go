package main

import (
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

func TestOperationIDs(t *testing.T) {
	t.Parallel()
	operation := func(id uint64) []byte {
		var o []byte
		o = protowire.AppendVarint(protowire.AppendTag(o, 1, protowire.VarintType), id)
		o = protowire.AppendVarint(protowire.AppendTag(o, 2, protowire.VarintType), 77)
		return protowire.AppendString(protowire.AppendTag(o, 3, protowire.BytesType), "merge")
	}
	var answer []byte
	for _, id := range []uint64{5, 900} {
		answer = protowire.AppendBytes(protowire.AppendTag(answer, 1, protowire.BytesType), operation(id))
	}
	answer = protowire.AppendVarint(protowire.AppendTag(answer, 2, protowire.VarintType), 1) // paused
	ids, err := operationIDs(answer)
	if want := []uint64{5, 900}; err != nil || !slices.Equal(ids, want) {
		t.Errorf("ids %v, error %v, want %v", ids, err, want)
	}
	if _, err := operationIDs(answer[:3]); err == nil {
		t.Error("half a message is read without an error")
	}
}

// fourPuts are due at 0, 1, 2 and 3 s; the one at 1 s is answered at 2.5 s.
func fourPuts() *pacedLoad {
	hands := []*hand{
		{puts: []put{{0, 1000, 0}, {2 * time.Second, 1000, 1}}, failed: []failure{{time.Second, "no"}}},
		{puts: []put{{time.Second, 1_500_000, 0}, {3 * time.Second, 1000, 1}}},
	}
	return &pacedLoad{hands: hands}
}

func TestWindowsOfPuts(t *testing.T) {
	t.Parallel()
	l := fourPuts()
	if got, want := l.p99(0, 4*time.Second), 1500*time.Millisecond; got != want {
		t.Errorf("p99 of all %v, want %v", got, want)
	}
	if got, want := l.p99(2*time.Second, 4*time.Second), time.Millisecond; got != want {
		t.Errorf("p99 from 2 s on %v, want %v", got, want)
	}
	if got, want := l.madeRate(time.Second, 3*time.Second), 1.0; got != want {
		t.Errorf("rate %v, want %v", got, want)
	}
	if n, err := l.failures(0, time.Second); n != 0 || err != nil {
		t.Errorf("%d failures before the first (%v)", n, err)
	}
	if n, err := l.failures(time.Second, 2*time.Second); n != 1 || err == nil {
		t.Errorf("%d failures (%v), want one and its text", n, err)
	}
	// Key 0 is acknowledged at 1 ms and at 2.5 s, key 1 at 2.001 s and 3.001 s.
	if got, want := l.gap(0, 1, 0, 2500*time.Millisecond), 2499*time.Millisecond; got != want {
		t.Errorf("gap of key 0 %v, want %v", got, want)
	}
	if got, want := l.gap(0, 2, 0, 4*time.Second), 2*time.Second; got != want {
		t.Errorf("gap of both %v, want %v", got, want)
	}
}

// threeNodes are ranges of so many MiB, each on the three founders.
func threeNodes(sizes ...int64) []rangeState {
	var list []rangeState
	for i, s := range sizes {
		list = append(list, rangeState{ID: uint64(i + 1), Bytes: s * mebibyte, Leader: nodeName(i % nodes), Replicas: []string{"n1", "n2", "n3"}})
	}
	return list
}

func TestLeastMoves(t *testing.T) {
	t.Parallel()
	// 3 × 120 MiB over four nodes: 90 each, and one range of 10 may be missing.
	even := slices.Repeat([]int64{10}, 12)
	if moves, leads := least(threeNodes(even...)); moves != 8 || leads != 2 {
		t.Errorf("twelve equal ranges: %d moves and %d leads, want 8 and 2", moves, leads)
	}
	// 3 × 120 again, but the three largest ranges make up 80 of it.
	if moves, _ := least(threeNodes(40, 20, 20, 5, 5, 5, 5, 5, 5, 4, 3, 3)); moves != 3 {
		t.Errorf("unequal ranges: %d moves, want 3", moves)
	}
}

func TestHolding(t *testing.T) {
	t.Parallel()
	list := threeNodes(10, 10, 10, 10)
	h := holding(list, mostNodes)
	if want := []float64{40, 40, 40, 0}; !slices.Equal(h.Bytes, want) || h.Even {
		t.Errorf("bytes %v, even %v, want %v and not even", h.Bytes, h.Even, want)
	}
	after := slices.Clone(list)
	for i := range 3 {
		after[i].Replicas = slices.Clone(after[i].Replicas)
		after[i].Replicas[i] = nodeName(joiner)
	}
	h = holding(after, mostNodes)
	if want := []float64{30, 30, 30, 30}; !slices.Equal(h.Bytes, want) || !h.Even {
		t.Errorf("bytes %v, even %v, want %v and even", h.Bytes, h.Even, want)
	}
	if n := elsewhere(list, after); n != 3 {
		t.Errorf("%d replicas are elsewhere, want 3", n)
	}
	for i := range after {
		after[i].Leader = nodeName(0)
	}
	if h := holding(after, mostNodes); h.Even {
		t.Error("one node leads everything, and that counts as even")
	}
}
