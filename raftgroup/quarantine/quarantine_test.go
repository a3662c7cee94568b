package quarantine

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

// A note of a later format keeps the node from starting: what it keeps closed is not known.
func TestNotesHaveAVersion(t *testing.T) {
	e, err := engine.Open(engine.Options{FS: simdisk.New(), Dir: "data", Clock: clock.System(), BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	load := func() (*List, error) {
		return Load(e, prometheus.NewGauge(prometheus.GaugeOpts{Name: "x"}))
	}
	l, err := load()
	if err != nil {
		t.Fatal(err)
	}
	q := Entry{Replica: 7, Reason: "rot"}
	l.Add(3, q)
	if err := l.Note(t.Context(), 3, q); err != nil {
		t.Fatal(err)
	}
	if l, err = load(); err != nil {
		t.Fatal(err)
	}
	if got, ok := l.Has(3, 7); !ok || got != q {
		t.Errorf("a note is read as %+v %t", got, ok)
	}
	note, ok, err := e.Get(key(3))
	if err != nil || !ok || !strings.HasPrefix(string(note), `{"version":1,`) {
		t.Fatalf("the note is %s %t %v", note, ok, err)
	}
	later := strings.Replace(string(note), `"version":1`, `"version":2`, 1)
	if err := l.commit(func(b *engine.Batch) error { return b.Set(key(3), []byte(later)) }); err != nil {
		t.Fatal(err)
	}
	if _, err := load(); !keyspace.IsVersionError(err) {
		t.Errorf("a later format: %v", err)
	}
}
