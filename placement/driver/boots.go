package driver

import (
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
)

// seeBoot takes over whether a node has started anew. old is the node as it was.
func (d *decider) seeBoot(id keyspace.NodeID, old *decide.Node, now clock.Time) {
	b := d.boots[id]
	if b == nil {
		b = &boots{}
		d.boots[id] = b
	}
	if d.s.o.Alive(id) {
		b.see(d.s.o.BootOf(id), old.SilentSince, now, d.s.bootLasts())
	}
}

// silent says whether a node is not heard, or starts again and again. The latter is never silent for
// NodeDeadAfter, and would keep its replicas for ever while its ranges have a voter less each time.
func (d *decider) silent(id keyspace.NodeID) bool {
	b := d.boots[id]
	return !d.s.o.Alive(id) || b != nil && b.flaps()
}

// boots are the boots of a node in a row: each came before the one before it had lasted.
type boots struct {
	boot keyspace.BootID
	at   clock.Time // since when the node is known to run in this boot
	row  int
	// began is when the node first fell silent, or restarted, in this row.
	began clock.Time
}

// see takes in which boot the node is heard. silentSince is 0 if it was heard just before. A boot that
// has lasted ends the row.
func (b *boots) see(boot keyspace.BootID, silentSince, now clock.Time, lasts time.Duration) {
	switch {
	case boot == 0:
	case b.boot == 0:
		b.boot = boot // how often it has started before is not known
	case b.boot != boot:
		if b.row == 0 {
			b.began = now
			if silentSince != 0 {
				b.began = silentSince
			}
		}
		b.boot, b.at = boot, now
		b.row++
	case b.row > 0 && now.Sub(b.at) >= lasts:
		b.row = 0
	}
}

// flaps says whether the node starts again and again. Every node starts once in a while.
func (b *boots) flaps() bool { return b.row > 1 && !mutation.Is(mutation.BootsForgotten) }

// bootLasts is how long a node must have run to be trusted again after boots in a row. A longer time
// finds nodes that crash more seldom. But two restarts by hand must not have a healthy node count as
// lost. The second one comes within this time, and the row ends within it again. That leaves a third of
// NodeDeadAfter for the pauses.
func (s *Driver) bootLasts() time.Duration { return s.o.NodeDeadAfter / 3 }
