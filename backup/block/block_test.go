package block

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// someVersions has every field of a version in use, and extremes.
func someVersions() []mvcc.Version {
	key := []byte("/registry/pods/a")
	return []mvcc.Version{
		{Key: []byte("/a"), Mod: keyspace.MaxRevision, Create: 1, Version: math.MaxInt64, Lease: math.MaxInt64, Sub: math.MaxUint32, Value: []byte("x")},
		{Key: key, Mod: 9, Tombstone: true, Sub: 3, Earlier: &mvcc.Version{
			Key: key, Mod: 9, Create: 3, Version: 3, Sub: 2, Lease: -5, Value: []byte("put in the same transaction"),
			Earlier: &mvcc.Version{Key: key, Mod: 9, Tombstone: true, Sub: 1},
		}},
		{Key: key, Mod: 7, Create: 3, Version: 2, Lease: 7, Value: bytes.Repeat([]byte("value "), 20)},
		{Key: key, Mod: 3, Create: 3, Version: 1, Value: []byte{}},
		{Key: []byte("/registry/pods/ab"), Mod: 1, Create: 1, Version: 1, Value: []byte("v")},
	}
}

func mustEncode(t testing.TB, order Order, vs []mvcc.Version) ([][]byte, Sum) {
	t.Helper()
	blocks, sum, err := Encode(order, vs)
	if err != nil {
		t.Fatal(err)
	}
	return blocks, sum
}

func TestGolden(t *testing.T) {
	blocks, _ := mustEncode(t, ByKey, someVersions())
	events, _ := mustEncode(t, ByRevision, []mvcc.Version{
		{Key: []byte("b"), Mod: 2, Create: 2, Version: 1, Value: []byte("1")},
		{Key: []byte("a"), Mod: 3, Create: 3, Version: 1, Value: []byte("2")},
		{Key: []byte("b"), Mod: 3, Sub: 1, Tombstone: true},
	})
	if len(blocks) != 1 || len(events) != 1 {
		t.Fatalf("%d and %d blocks", len(blocks), len(events))
	}
	if blocks[0][headBytes]&flagStored != 0 || events[0][headBytes]&flagStored == 0 {
		t.Error("want one block compressed and one stored")
	}
	golden.Formats(t, map[string][]byte{"by-key": blocks[0], "by-revision": events[0]})
}

func TestRoundTrip(t *testing.T) {
	vs := someVersions()
	blocks, sum := mustEncode(t, ByKey, vs)
	got, order, err := Decode(blocks[0])
	if err != nil || order != ByKey {
		t.Fatal(order, err)
	}
	if !reflect.DeepEqual(got, vs) {
		t.Errorf("got %+v, want %+v", got, vs)
	}
	var want Sum
	hash := uint64(0)
	for i := range vs {
		want.Add(&vs[i])
		for w := &vs[i]; w != nil; w = w.Earlier {
			hash += mvcc.HashWrite(w)
		}
	}
	if sum != want || sum.Hash != hash || sum.Versions != int64(len(vs)) {
		t.Errorf("sum %v, want %v, hash %x", sum, want, hash)
	}
}

// manyVersions are n versions in order ByKey, with keys as Kubernetes has them and values of
// about valueBytes of JSON.
func manyVersions(rng *rand.Rand, n, valueBytes int) []mvcc.Version {
	vs := make([]mvcc.Version, 0, n)
	for i := 0; len(vs) < n; i++ {
		key := fmt.Appendf(nil, "/registry/pods/namespace-%04d/deployment-%08d", i/50, i)
		mod := keyspace.Revision(1e6 + rng.Int64N(1e9))
		create := mod - keyspace.Revision(rng.Int64N(1e5))
		for range min(1+rng.IntN(3), n-len(vs)) {
			value := make([]byte, 0, valueBytes+32)
			for len(value) < valueBytes {
				value = fmt.Appendf(value, `{"name":"pod-%08x","phase":"Running"}`, rng.Uint32())
			}
			vs = append(vs, mvcc.Version{Key: key, Mod: mod, Create: create, Version: int64(mod-create) + 1, Value: value[:valueBytes]})
			if mod--; mod < create {
				break
			}
		}
	}
	return vs
}

func TestStreamIsCutIntoBlocks(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	vs := manyVersions(rng, 20000, 100)
	for i := range 50 { // versions larger than a block, among small ones
		v := &vs[i*300]
		v.Value = make([]byte, MaxBytes/2*(1+i%7))
		if i%2 == 0 {
			_, _ = rand.NewChaCha8([32]byte{byte(i)}).Read(v.Value)
		}
	}
	blocks, sum := mustEncode(t, ByKey, vs)
	var d Decoder
	var got Sum
	n := 0
	for _, b := range blocks {
		ws, err := d.Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		charge := int64(0)
		for i := range ws {
			if !reflect.DeepEqual(ws[i], vs[n]) {
				t.Fatalf("version %d: got %.200v, want %.200v", n, ws[i], vs[n])
			}
			charge += Charge(&ws[i])
			got.Add(&ws[i])
			n++
		}
		if len(ws) > 1 && charge > MaxBytes {
			t.Errorf("a block of %d versions is charged %d", len(ws), charge)
		}
	}
	if n != len(vs) || got != sum {
		t.Errorf("%d versions of %d, sum %v, want %v", n, len(vs), got, sum)
	}
}

func TestSumHasNoOrder(t *testing.T) {
	vs := manyVersions(rand.New(rand.NewPCG(3, 4)), 100, 20)
	var forward, backward, left, right Sum
	for i := range vs {
		forward.Add(&vs[i])
		backward.Add(&vs[len(vs)-1-i])
		if i%2 == 0 {
			left.Add(&vs[i])
		} else {
			right.Add(&vs[i])
		}
	}
	left.Merge(right)
	if forward != backward || forward != left {
		t.Errorf("%v, %v, %v", forward, backward, left)
	}
}

func TestWriterRefuses(t *testing.T) {
	a := mvcc.Version{Key: []byte("a"), Mod: 5, Create: 5, Version: 1}
	with := func(change func(v *mvcc.Version)) mvcc.Version {
		v := a
		change(&v)
		return v
	}
	for name, c := range map[string]struct {
		order Order
		vs    []mvcc.Version
		want  string
	}{
		"twice":       {ByKey, []mvcc.Version{a, a}, "follows key"},
		"older first": {ByKey, []mvcc.Version{a, with(func(v *mvcc.Version) { v.Mod = 6 })}, "in the order by key"},
		"lower key":   {ByKey, []mvcc.Version{with(func(v *mvcc.Version) { v.Key = []byte("b") }), a}, "in the order by key"},
		"newer first": {ByRevision, []mvcc.Version{with(func(v *mvcc.Version) { v.Mod = 6 }), a}, "in the order by revision"},
		"no key":      {ByKey, []mvcc.Version{with(func(v *mvcc.Version) { v.Key = nil })}, "empty key"},
		"no create":   {ByKey, []mvcc.Version{with(func(v *mvcc.Version) { v.Create = 0 })}, "create 0"},
		"too large":   {ByKey, []mvcc.Version{with(func(v *mvcc.Version) { v.Value = make([]byte, MaxVersionBytes) })}, `key "a" at revision 5`},
		"key too large": {ByKey, []mvcc.Version{with(func(v *mvcc.Version) {
			v.Key = bytes.Repeat([]byte("k"), MaxBytes+1)
		})}, "key of 262145 bytes"},
	} {
		if _, _, err := Encode(c.order, c.vs); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// Trap 121: no flipped bit of a block goes unnoticed.
func TestFlippedBits(t *testing.T) {
	blocks, _ := mustEncode(t, ByKey, someVersions())
	b := blocks[0]
	for i := range len(b) * 8 {
		c := bytes.Clone(b)
		c[i/8] ^= 1 << (i % 8)
		_, _, err := Decode(c)
		if err == nil || i >= 8 && !errors.Is(err, ErrCorrupt) {
			t.Errorf("bit %d: %v", i, err)
		}
	}
	for n := range b {
		if _, _, err := Decode(b[:n]); err == nil {
			t.Errorf("cut to %d bytes: no error", n)
		}
	}
}

// seal makes a block with a right checksum of anything.
func seal(flags byte, count, size uint64, payload []byte) []byte {
	b := append(make([]byte, headBytes), flags)
	b[0] = version
	b = binary.AppendUvarint(binary.AppendUvarint(b, count), size)
	b = append(b, payload...)
	return reseal(b)
}

func reseal(b []byte) []byte {
	if len(b) >= headBytes {
		b[0] = version
		binary.BigEndian.PutUint32(b[1:], crc32.Checksum(b[headBytes:], crcTable))
	}
	return b
}

// Claims that the bytes do not keep are refused before memory is taken for them.
func TestClaims(t *testing.T) {
	zeros := coders.enc.EncodeAll(make([]byte, chunkBytes), nil)
	chunk := append(binary.AppendUvarint(nil, uint64(len(zeros))), zeros...)
	// One key of nearly all that the keys of a block may have, then many that share it.
	amplified := append([]byte{writeTombstone, 0}, binary.AppendUvarint(nil, MaxBytes/2)...)
	amplified = append(amplified, bytes.Repeat([]byte("k"), MaxBytes/2)...)
	amplified = append(amplified, 2)
	for range 1000 {
		amplified = append(binary.AppendUvarint(append(amplified, writeTombstone), MaxBytes/2), 1, 'a', 0)
	}
	for name, c := range map[string]struct {
		b    []byte
		want string
	}{
		"no versions":     {seal(flagStored, 0, 0, nil), "0 versions"},
		"many versions":   {seal(flagStored, MaxVersions+1, 10, make([]byte, 10)), "4097 versions"},
		"versions":        {seal(flagStored, MaxVersions, 10, make([]byte, 10)), "4096 versions in 10 bytes"},
		"size":            {seal(0, 1, MaxVersionBytes, chunk), "262144 bytes, noted"},
		"size of many":    {seal(0, 2, MaxBytes+1, chunk), "2 versions in 262145 bytes"},
		"huge":            {seal(0, 1, MaxVersionBytes+1, chunk), "1 versions in"},
		"bomb":            {seal(0, 1, 100, bytes.Repeat(chunk, 100)), "262144 bytes, noted 100"},
		"not zstd":        {seal(0, 1, 5, []byte("\x05hello")), "magic"},
		"empty chunks":    {seal(0, 1, 5, make([]byte, 1000)), "0 bytes, noted 5"},
		"keys":            {seal(flagStored, 1001, uint64(len(amplified)), amplified), "more than 262144 bytes"},
		"same key first":  {seal(flagStored, 1, 3, []byte{writeSameKey | writeTombstone, 2, 0}), "empty key"},
		"bytes left over": {seal(flagStored, 1, 6, []byte{writeTombstone, 0, 1, 'a', 2, 9}), "left over"},
		"unknown flag":    {seal(0x80, 1, 1, []byte{0}), "flag"},
	} {
		if _, _, err := Decode(c.b); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	newer := seal(flagStored, 1, 1, []byte{0})
	newer[0]++
	if _, _, err := Decode(newer); err == nil || errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "use a newer program") {
		t.Errorf("a newer version: %v", err)
	}
}

// The order holds over the borders of blocks, too.
func TestDecoderChecksTheStream(t *testing.T) {
	blocks, _ := mustEncode(t, ByKey, manyVersions(rand.New(rand.NewPCG(5, 6)), 3000, 200))
	if len(blocks) < 3 {
		t.Fatalf("%d blocks", len(blocks))
	}
	for name, order := range map[string][]int{"twice": {0, 0}, "backwards": {1, 0}} {
		var d Decoder
		if _, err := d.Decode(blocks[order[0]]); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Decode(blocks[order[1]]); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	d := Decoder{Order: ByRevision}
	if _, err := d.Decode(blocks[0]); !errors.Is(err, ErrCorrupt) {
		t.Errorf("wrong order: %v", err)
	}
}

// FuzzDecode decodes anything under a right checksum. What is decoded must be encoded to
// the same versions again.
func FuzzDecode(f *testing.F) {
	blocks, _ := mustEncode(f, ByKey, someVersions())
	f.Add(blocks[0][headBytes:])
	var w []byte
	prev := &mvcc.Version{}
	vs := someVersions()
	for i := range vs {
		w = appendVersion(w, &vs[i], prev)
		prev = &vs[i]
	}
	f.Add(seal(flagStored, uint64(len(vs)), uint64(len(w)), w)[headBytes:])
	f.Fuzz(func(t *testing.T, b []byte) {
		vs, order, err := Decode(reseal(append(make([]byte, headBytes), b...)))
		if err != nil {
			return
		}
		blocks, sum := mustEncode(t, order, vs)
		if len(blocks) != 1 {
			t.Fatalf("%d blocks of one", len(blocks))
		}
		again, _, err := Decode(blocks[0])
		if err != nil || !reflect.DeepEqual(again, vs) {
			t.Fatalf("%v: %+v, again %+v", err, vs, again)
		}
		var got Sum
		for i := range again {
			got.Add(&again[i])
		}
		if got != sum {
			t.Fatalf("sum %v, again %v", sum, got)
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	for _, size := range []int{32, 256, 4096} {
		b.Run(fmt.Sprintf("value=%d", size), func(b *testing.B) {
			vs := manyVersions(rand.New(rand.NewPCG(7, 8)), 4<<20/(size+64), size)
			var packed int
			_, sum := mustEncode(b, ByKey, vs)
			b.SetBytes(sum.Bytes)
			for b.Loop() {
				packed = 0
				w := NewWriter(ByKey, func(p []byte, _ Sum) error { packed += len(p); return nil })
				for i := range vs {
					if err := w.Add(&vs[i]); err != nil {
						b.Fatal(err)
					}
				}
				if err := w.Flush(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(sum.Bytes)/float64(packed), "ratio")
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, size := range []int{32, 256, 4096} {
		b.Run(fmt.Sprintf("value=%d", size), func(b *testing.B) {
			blocks, sum := mustEncode(b, ByKey, manyVersions(rand.New(rand.NewPCG(7, 8)), 4<<20/(size+64), size))
			b.SetBytes(sum.Bytes)
			b.ReportAllocs()
			for b.Loop() {
				var d Decoder
				var got Sum
				for _, p := range blocks {
					vs, err := d.Decode(p)
					if err != nil {
						b.Fatal(err)
					}
					for i := range vs {
						got.Add(&vs[i])
					}
				}
			}
		})
	}
}
