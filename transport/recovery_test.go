package transport_test

import (
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// meeting is what a node hears of a peer's recovery.
type meeting struct {
	peer     keyspace.NodeID
	plan     uint64
	together bool
}

// planned is what a node knows of its own recovery. It may have sessions if it is open.
type planned struct {
	plan           uint64
	together, open bool
	met            chan meeting
}

func (p *planned) Now() (plan uint64, together bool) { return p.plan, p.together }

func (p *planned) Meet(peer keyspace.NodeID, plan uint64, together bool) bool {
	select {
	case p.met <- meeting{peer, plan, together}:
	default:
	}
	return p.open
}

func withRecovery(o transport.Options, p *planned) transport.Options {
	o.Recovery = p
	return o
}

// TestDiallerMindsARecovery: a node that dials hears of the other's recovery, also from one that refuses it. There is no
// session as long as one of the two waits. The other one never dials here, so that nothing else tells it.
func TestDiallerMindsARecovery(t *testing.T) {
	for name, c := range map[string]struct {
		dials, answers planned
		up             bool
	}{
		"it waits, and the other has no plan":            {planned{plan: 7}, planned{open: true}, false},
		"it waits, and the other waits too":              {planned{plan: 7}, planned{plan: 7}, false},
		"it waits, and the other knows that all have it": {planned{plan: 7}, planned{plan: 7, together: true, open: true}, false},
		"the other waits":                                {planned{open: true}, planned{plan: 7}, false},
		"nobody waits":                                   {planned{plan: 7, together: true, open: true}, planned{plan: 8, together: true, open: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			c.dials.met = make(chan meeting, 100)
			tr := newTrial(t, withRecovery(selfMade(1), &c.dials), withRecovery(selfMade(2), &c.answers))
			want := meeting{2, c.answers.plan, c.answers.together}
			for attempt := range 2 {
				select {
				case got := <-c.dials.met:
					if got != want {
						t.Fatalf("it heard %+v, want %+v", got, want)
					}
				case <-time.After(30 * time.Second):
					t.Fatalf("it did not hear of the other's recovery at attempt %d", attempt)
				}
				if c.up {
					tr.wantUp()
					return
				}
			}
			select {
			case s := <-tr.up:
				if s.Up {
					t.Error("there is a session")
				}
			default:
			}
		})
	}
}

// TestRecoveryOfAStranger: what a node says of its recovery counts only if its certificate proves who it is.
func TestRecoveryOfAStranger(t *testing.T) {
	ca := newAuthority(t)
	uri := func(node keyspace.NodeID) string { return transport.IdentityURI(cluster, node) }
	dials := &planned{plan: 7, met: make(chan meeting, 100)}
	tr := newTrial(t,
		withRecovery(options(1, ca.security("p1", leaf{uri: uri(1)})), dials),
		withRecovery(options(2, ca.security("p6", leaf{uri: uri(6)})), &planned{plan: 7, together: true, open: true}))
	tr.wantLog("a peer does not fit", false)
	select {
	case got := <-dials.met:
		t.Errorf("it believed %+v of a node whose certificate is another's", got)
	default:
	}
}
