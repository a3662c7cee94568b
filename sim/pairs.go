package sim

import (
	"maps"
	"slices"
	"time"
)

// Pair is two kinds of faults that were there at the same time, in the order of their names.
type Pair [2]Fault

func pairOf(a, b Fault) Pair {
	p := Pair{a, b}
	slices.Sort(p[:])
	return p
}

// String returns both names.
func (p Pair) String() string { return string(p[0]) + " + " + string(p[1]) }

// meets says whether two faults can be there at the same time. Crashes of most nodes leave
// nothing for another one of their kind.
func (p Pair) meets() bool {
	most := []Fault{CrashTwo, CrashAll}
	return p[0] != p[1] && !excludes(p[0], p[1]) && !(slices.Contains(most, p[0]) && slices.Contains(most, p[1])) &&
		!(brief(p[0]) && brief(p[1]))
}

// brief says whether a fault is over when it has been injected, or nearly so.
func brief(f Fault) bool { return f == Blink || f == Transfer || f == CutOff }

// roundOf returns round r of a tournament in which each kind of fault meets each other kind once:
// the pairs that can meet, as a list of faults. There are as many rounds as kinds, or one less if
// the kinds are even.
func roundOf(kinds []Fault, r int) (faults []Fault) {
	kinds = slices.Clone(kinds)
	if len(kinds)%2 == 1 {
		kinds = append(kinds, "") // who meets it pauses
	}
	last := len(kinds) - 1
	at := func(i int) Fault { // all but the last place move on by one place in each round
		if i == last {
			return kinds[last]
		}
		return kinds[(i+r)%last]
	}
	for i := range len(kinds) / 2 {
		// The last place meets the first one, and the others meet from outside in.
		a, b := at(i), at(last-i)
		if i == 0 {
			a, b = at(0), at(last)
		}
		if a != "" && b != "" && pairOf(a, b).meets() {
			faults = append(faults, a, b)
		}
	}
	return faults
}

// roundsOf is how many rounds there are.
func roundsOf(kinds []Fault) int { return (len(kinds)+1)/2*2 - 1 }

// inPairs injects the faults of the configuration two at a time, in their order, and counts the
// pairs of which both took effect.
func (n *nemesis) inPairs() error {
	for two := range slices.Chunk(n.c.cfg.Faults, 2) {
		if n.broken() || n.unbuilt {
			return nil
		}
		first, second := two[0], two[1]
		// A brief fault comes second. So does one that leaves no node to the other.
		late := func(f Fault) bool { return brief(f) || f == CrashTwo || f == CrashAll }
		if late(first) || !late(second) && n.rng.IntN(2) == 0 {
			first, second = second, first
		}
		n.c.sleep(n.c.intoBurst(n.rng))
		before := maps.Clone(n.happened)
		heal := []func() error{n.inject(first)}
		n.c.sleep(n.between(50*time.Millisecond, 1500*time.Millisecond))
		heal = append(heal, n.inject(second))
		n.c.sleep(n.lasts())
		n.rng.Shuffle(2, func(i, j int) { heal[i], heal[j] = heal[j], heal[i] })
		if err := n.heal(heal); err != nil {
			return err
		}
		if n.happened[first] > before[first] && n.happened[second] > before[second] {
			n.met[pairOf(first, second)]++
		}
	}
	return n.again()
}
