package eval

import (
	"math/rand/v2"
	"testing"
)

// TestSlotIndex compares the index with a map. Its hashes are few, so that they collide, and their runs are long and cross the
// table's end.
func TestSlotIndex(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 50 {
		var x slotIndex
		model := map[int32]uint32{} // hash by slot
		most, near := 1+rng.IntN(2000), uint32(1+rng.IntN(300))
		for range 10_000 {
			slot := int32(rng.IntN(most))
			if hash, ok := model[slot]; ok {
				x.remove(hash, slot)
				delete(model, slot)
			} else {
				hash := -rng.Uint32N(near) // near the table's end
				x.add(hash, slot)
				model[slot] = hash
			}
		}
		if x.n != len(model) || 2*x.n > len(x.buckets) {
			t.Fatalf("%d slots in %d buckets, want %d", x.n, len(x.buckets), len(model))
		}
		for slot, hash := range model {
			found := 0
			for i, b := x.find(hash, int(hash)); i >= 0; i, b = x.find(hash, b+1) {
				if model[i] != hash {
					t.Fatalf("slot %d is found by hash %x, it has %x", i, hash, model[i])
				}
				if i == slot {
					found++
				}
			}
			if found != 1 {
				t.Fatalf("slot %d is found %d times", slot, found)
			}
		}
	}
}
