package node

import (
	"reflect"
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
