package main

import (
	"testing"
	"time"
)

func TestScaleKinds(t *testing.T) {
	o := scaleOptions{sizes: "3, 9", ranges: "16", ofNode: 8, rate: 300, clients: 256, turns: 1, turn: time.Second}
	kinds, err := o.kinds()
	want := []scaleKind{
		{"3 nodes, 24 ranges", 3, 24, 96, 900},
		{"9 nodes, 72 ranges", 9, 72, 288, 2700},
		{"16 ranges", 3, 16, 256, 0},
	}
	if err != nil || len(kinds) != len(want) {
		t.Fatalf("%+v, %v", kinds, err)
	}
	for i := range want {
		if kinds[i] != want[i] {
			t.Errorf("%+v in place of %+v", kinds[i], want[i])
		}
	}
	for _, bad := range []string{"2", "10", "3,,5", "many", "-3"} {
		o.sizes = bad
		if kinds, err := o.kinds(); err == nil {
			t.Errorf("--nodes %s: %+v", bad, kinds)
		}
	}
}

func TestLeads(t *testing.T) {
	list := []rangeState{{Leader: "n1"}, {Leader: "n3"}, {Leader: "n1"}, {Leader: "n2"}, {}}
	if least, most := leads(list, 3); least != 1 || most != 2 {
		t.Errorf("%d to %d", least, most)
	}
	if least, most := leads(list, 4); least != 0 || most != 2 {
		t.Errorf("%d to %d", least, most)
	}
}
