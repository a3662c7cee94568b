package chaos

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// Faults between machines, beside those inside them.
const (
	cutOff     breakage = "cut off from all"
	bothWays   breakage = "partition both ways"
	oneLink    breakage = "one link, both ways"
	oneWay     breakage = "one link, one way"
	deaf       breakage = "partition one way, deaf"
	mute       breakage = "partition one way, mute"
	ring       breakage = "ring: neighbours alone hear each other"
	lossy      breakage = "link loses 30 of 100"
	slow       breakage = "link of 1 Mbit/s"
	clientless breakage = "no clients"
)

// ofNetwork are all of them.
var ofNetwork = []breakage{cutOff, bothWays, oneLink, oneWay, deaf, mute, ring, lossy, slow, clientless}

// trouble is one fault of a round. It begins at an offset in the round, and has a least
// length.
type trouble struct {
	breakage
	// victim is a machine, or leading; a ring has no victim.
	victim int
	// peers are the machines that a partition separates from the victim, or the order of
	// a ring.
	peers       []int
	after, hold time.Duration
	// seed chooses what of the machine breaks.
	seed uint64
}

func (t trouble) rng() *rand.Rand { return rand.New(rand.NewPCG(t.seed, 0)) }

func (t trouble) String() string {
	s := string(t.breakage)
	if t.breakage != ring {
		s += fmt.Sprintf(" of machine %d", t.victim+1)
	}
	if len(t.peers) > 0 {
		s += " " + fmt.Sprint(ones(t.peers))
	}
	return s
}

// ones are machines numbered from one.
func ones(machines []int) (out []int) {
	for _, m := range machines {
		out = append(out, m+1)
	}
	return out
}

// round is some faults at once, and how long the cluster was well before.
type round struct {
	troubles []trouble
	pause    time.Duration
}

func (r round) String() string {
	var parts []string
	for _, t := range r.troubles {
		parts = append(parts, t.String())
	}
	return strings.Join(parts, " + ")
}

// The bounds of a schedule.
const (
	leastAtOnce, mostAtOnce = 2, 4
	// mostBroken is how many machines have a fault inside at a time.
	mostBroken   = 2
	stormHold    = 2500 * time.Millisecond // longer than lease and election timeout
	stormStagger = 1200 * time.Millisecond
	// One round in aloneOneIn has all its faults at one machine: the others must serve.
	aloneOneIn = 3
)

// deal makes rounds of a storm from a seed in which each fault of a deck happens once.
// The last rounds are filled with random faults.
func deal(rng *rand.Rand, machines int, deck, can []breakage) (rounds []round) {
	deck = slices.Clone(deck)
	rng.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
	for len(deck) > 0 {
		n := leastAtOnce + rng.IntN(mostAtOnce-leastAtOnce+1)
		alone := rng.IntN(aloneOneIn) == 0
		var r round
		r.pause = 300*time.Millisecond + time.Duration(rng.Int64N(int64(700*time.Millisecond)))
		var hand []breakage
		for i := 0; i < len(deck) && len(hand) < n; {
			if !fits(hand, deck[i], alone) {
				i++
				continue
			}
			hand = append(hand, deck[i])
			deck = slices.Delete(deck, i, i+1)
		}
		if len(hand) == 0 { // a ring and alone
			continue
		}
		// The rest of the deck may be too little for a round.
		for tries := 0; len(hand) < leastAtOnce && tries < 100; tries++ {
			if b := can[rng.IntN(len(can))]; fits(hand, b, alone) {
				hand = append(hand, b)
			}
		}
		order := rng.Perm(machines)
		if rng.IntN(2) == 0 {
			order[slices.Index(order, 0)], order[0] = order[0], leading
		}
		for i, b := range hand {
			victim := order[i%machines]
			if alone {
				victim = order[0]
			}
			r.troubles = append(r.troubles, draw(rng, b, victim, machines))
		}
		rounds = append(rounds, r)
	}
	return rounds
}

// fits says whether a fault may come beside others.
func fits(hand []breakage, b breakage, alone bool) bool {
	most := mostBroken
	if alone {
		most = 1
	}
	inside := 0
	for _, h := range hand {
		if !slices.Contains(ofNetwork, h) {
			inside++
		}
	}
	switch {
	case slices.Contains(hand, b):
		return false
	case b == rotTable && slices.Contains(hand, rotLog), b == rotLog && slices.Contains(hand, rotTable):
		return false // what both have held may have no majority left
	case slices.Contains(ofNetwork, b):
		return b != ring || !alone
	}
	return inside < most
}

// draw fills in what a trouble leaves open.
func draw(rng *rand.Rand, b breakage, victim, machines int) trouble {
	t := trouble{breakage: b, victim: victim}
	least := max(leastHold[b], stormHold)
	t.hold = least + time.Duration(rng.Int64N(int64(least)))
	t.after = time.Duration(rng.Int64N(int64(stormStagger)))
	switch b {
	case rotTable, rotLog:
		t.seed = rng.Uint64()
	case oneLink, oneWay:
		t.peers = rng.Perm(machines)[:2] // the victim may be one of them
	case ring:
		t.peers = rng.Perm(machines)
	case bothWays, deaf, mute:
		// The victim itself is left out of these later.
		t.peers = rng.Perm(machines)[:2+rng.IntN(machines-1)]
		slices.Sort(t.peers)
	default: // not between machines, or between one and all
	}
	return t
}

// victims are the machines at which something is wrong during a round; nil stands for
// all.
func (r round) victims() (out []int) {
	for _, t := range r.troubles {
		if t.breakage == ring {
			return nil
		}
		if !slices.Contains(out, t.victim) {
			out = append(out, t.victim)
		}
	}
	return out
}

// mustServe are the machines that must serve everything during a round, none if more
// than one machine has faults. Whatever is separated from the one machine alone goes around
// it. The machine itself must serve too if nothing but a minority of the others is separated
// from it. In a ring every machine reaches a majority, and every other one by its neighbours.
func (r round) mustServe(machines int) (through []int) {
	v := r.victims()
	if v == nil { // there is a ring
		for _, t := range r.troubles {
			if t.breakage == clientless {
				v = append(v, t.victim)
			} else if t.breakage != ring {
				return nil
			}
		}
		return slices.DeleteFunc(rangeOf(machines), func(m int) bool { return slices.Contains(v, m) })
	}
	if len(v) != 1 {
		return nil
	}
	var parted []int
	whole := true // it has all but some links
	for _, t := range r.troubles {
		whole = whole && slices.Contains([]breakage{bothWays, oneLink, oneWay, deaf, mute}, t.breakage)
		for _, p := range t.peers {
			if !slices.Contains(parted, p) {
				parted = append(parted, p)
			}
		}
	}
	return slices.DeleteFunc(rangeOf(machines), func(m int) bool {
		return m == v[0] && (!whole || 2*(machines-len(parted)) <= machines)
	})
}

// rangeOf are the machines from the first one on.
func rangeOf(machines int) (all []int) {
	for m := range machines {
		all = append(all, m)
	}
	return all
}

// has says whether a fault is one of them.
func (r round) has(b breakage) bool {
	return slices.ContainsFunc(r.troubles, func(t trouble) bool { return t.breakage == b })
}

// settle puts a machine in the place of leading. If the round breaks that machine
// already, another one takes its place there.
func (r round) settle(leader, machines int) round {
	r.troubles = slices.Clone(r.troubles)
	free := 0
	taken := func(m int) bool {
		return m == leader || slices.ContainsFunc(r.troubles, func(t trouble) bool { return t.victim == m })
	}
	if !slices.ContainsFunc(r.troubles, func(t trouble) bool { return t.victim == leading }) {
		leader = leading // and in nobody else's place
	}
	for free < machines-1 && taken(free) {
		free++
	}
	for i := range r.troubles {
		t := &r.troubles[i]
		switch t.victim {
		case leading:
			t.victim = leader
		case leader:
			t.victim = free
		}
		if t.breakage != ring {
			t.peers = slices.DeleteFunc(slices.Clone(t.peers), func(p int) bool { return p == t.victim })
			if t.breakage == oneLink || t.breakage == oneWay {
				t.peers = t.peers[:1]
			}
		}
	}
	return r
}

// stormMachines is how many machines a storm has.
const stormMachines = 5

// Every schedule has each fault, two to four of them at once, no two inside one machine
// and no more than two machines broken inside, whoever leads. A seed always gives the
// same schedule.
func TestScheduleIsBounded(t *testing.T) {
	can := append([]breakage{kill, stop, power, hang, full, rotTable, rotLog, paused}, ofNetwork...)
	for seed := range uint64(500) {
		rounds := deal(rand.New(rand.NewPCG(seed, 0)), stormMachines, can, can)
		if again := deal(rand.New(rand.NewPCG(seed, 0)), stormMachines, can, can); fmt.Sprint(again) != fmt.Sprint(rounds) {
			t.Fatalf("seed %d gives %v and %v", seed, rounds, again)
		}
		seen := map[breakage]bool{}
		for _, r := range rounds {
			r = r.settle(int(seed)%stormMachines, stormMachines)
			if n := len(r.troubles); n < leastAtOnce || n > mostAtOnce {
				t.Errorf("seed %d: %d at once: %s", seed, n, r)
			}
			broken := map[int]bool{}
			for _, x := range r.troubles {
				seen[x.breakage] = true
				if x.victim < 0 || x.victim >= stormMachines || x.hold < stormHold {
					t.Errorf("seed %d: %s for %v", seed, x, x.hold)
				}
				if len(x.peers) == 0 && slices.Contains([]breakage{bothWays, oneLink, oneWay, deaf, mute, ring}, x.breakage) || x.breakage != ring && slices.Contains(x.peers, x.victim) {
					t.Errorf("seed %d: from whom is %s?", seed, x)
				}
				if !slices.Contains(ofNetwork, x.breakage) {
					if broken[x.victim] {
						t.Errorf("seed %d: twice inside one machine: %s", seed, r)
					}
					broken[x.victim] = true
				}
			}
			if len(broken) > mostBroken {
				t.Errorf("seed %d: %d machines are broken: %s", seed, len(broken), r)
			}
		}
		for _, b := range can {
			if !seen[b] {
				t.Errorf("seed %d: no %s", seed, b)
			}
		}
	}
}

// While only one machine has faults the others must serve, and it too if it lacks some links
// alone.
func TestWhoMustServe(t *testing.T) {
	at := func(b breakage, victim int, peers ...int) trouble {
		return trouble{breakage: b, victim: victim, peers: peers}
	}
	for _, c := range []struct {
		troubles []trouble
		want     []int
	}{
		{[]trouble{at(kill, 4), at(clientless, 4)}, []int{0, 1, 2, 3}},
		{[]trouble{at(kill, 4), at(kill, 3)}, nil},
		{[]trouble{at(kill, 4), at(ring, leading, 0, 1, 2, 3, 4)}, nil},
		{[]trouble{at(full, 4), at(mute, 4, 0, 2, 3)}, []int{0, 1, 2, 3}},
		{[]trouble{at(stop, 4), at(mute, 4, 0, 2, 3)}, []int{0, 1, 2, 3}},
		{[]trouble{at(full, 4), at(bothWays, 4, 0, 1, 2, 3)}, []int{0, 1, 2, 3}},
		{[]trouble{at(deaf, 4, 0, 1), at(mute, 4, 2, 3)}, []int{0, 1, 2, 3}},
		{[]trouble{at(deaf, 4, 0, 1), at(lossy, 4)}, []int{0, 1, 2, 3}},
		{[]trouble{at(deaf, 4, 0, 1), at(mute, 4, 1)}, []int{0, 1, 2, 3, 4}},
		{[]trouble{at(deaf, 4, 0, 1), at(mute, 4, 2)}, []int{0, 1, 2, 3}},
		{[]trouble{at(oneLink, 4, 0), at(oneWay, 4, 1)}, []int{0, 1, 2, 3, 4}},
		{[]trouble{at(ring, leading, 0, 1, 2, 3, 4), at(clientless, 3)}, []int{0, 1, 2, 4}},
	} {
		if got := (round{troubles: c.troubles}).mustServe(stormMachines); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", round{troubles: c.troubles}, ones(got), ones(c.want))
		}
	}
}
