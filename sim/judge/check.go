package judge

import (
	"fmt"
	"slices"
)

// Evidence is what a run has left, to be judged.
type Evidence struct {
	History *History
	// Versions are all versions of all keys on the disks at the end, in the order of
	// revisions.
	Versions []Version
	// Watchers are the watchers of the run.
	Watchers []*Watcher
	// Access is what happened to users, nil without any.
	Access *Access
	// Cuts are the cuts that were made.
	Cuts []*Cut
	// Drained says that no lease was left at the end.
	Drained bool
	// Faulty says that faults were injected. Failures counts what may have left gaps in the revisions. Rebooted is the
	// highest revision known before all nodes were stopped at once, 0 if they were not.
	Faulty   bool
	Failures int
	Rebooted int64
	// Violations are what the run itself found to be wrong.
	Violations []string
}

// Violate records that something is wrong.
func (e *Evidence) Violate(format string, args ...any) {
	e.Violations = append(e.Violations, fmt.Sprintf(format, args...))
}

// Check judges a run and returns its violations, nil if there are none. It asks
// porcupine only if nothing else found a violation, because porcupine may take long
// over a wrong history.
func Check(r *Evidence) []string {
	bad, p := checkAnswers(r)
	if len(bad) > 0 {
		return bad
	}
	return checkOrder(r, p)
}

// CheckAnswers is the part of Check that needs no versions, for a run that did not
// reach its end.
func CheckAnswers(r *Evidence) []string {
	bad, _ := checkAnswers(r)
	return bad
}

// checkAnswers runs every check but the searches for an order. The replay is nil if
// there is none or it is wrong.
func checkAnswers(r *Evidence) (bad []string, p *replay) {
	bad = slices.Clone(r.Violations)
	ops := r.History.Ops()
	bad = append(bad, checkDefinite(ops)...)
	bad = append(bad, checkRealTime(ops)...)
	bad = append(bad, checkCompactions(ops)...)
	bad = append(bad, checkGrants(ops)...)
	if !r.Faulty {
		bad = append(bad, checkLate(ops)...)
	}
	if len(r.Versions) == 0 {
		bad = append(bad, checkLeases(ops, nil, nil, false)...)
		bad = append(bad, checkAccess(r.Access, ops, nil)...)
		return bad, nil // the run did not reach its end
	}
	start := r.History.Start()
	bad = append(bad, start.check(r.Versions)...)
	p, wrong := checkReplay(ops, r.Versions, start)
	bad = append(bad, start.checkReads(p)...)
	bad = append(bad, wrong...)
	bad = append(bad, checkGaps(ops, r.Versions, start.last()+1, r.Failures, r.Rebooted)...)
	bad = append(bad, checkCuts(r.Cuts, ops, r.Versions)...)
	bad = append(bad, checkWatchers(r.Watchers, r.Versions, compactedAt(ops))...)
	if len(wrong) > 0 {
		p = nil
	}
	bad = append(bad, checkLeases(ops, r.Versions, p, r.Drained)...)
	bad = append(bad, checkAccess(r.Access, ops, p)...)
	return bad, p
}

// checkOrder has porcupine search an order that explains the answers: for each key
// alone, and for all keys in windows of revisions.
func checkOrder(r *Evidence, p *replay) []string {
	ops := r.History.Ops()
	if p == nil {
		return checkKeys(ops, r.Versions, nil, r.History.Start())
	}
	return append(checkKeys(p.decided(ops), r.Versions, p, r.History.Start()), checkWindows(p)...)
}

// CheckUnfinished judges the partial history of a run that does not end.
func CheckUnfinished(h *History) []string {
	ops := h.Ops()
	bad := append(checkRealTime(ops), checkCompactions(ops)...)
	bad = append(bad, checkGrants(ops)...)
	bad = append(bad, checkLeases(ops, nil, nil, false)...)
	if len(bad) == 0 {
		bad = checkKeys(ops, nil, nil, h.Start())
	}
	return bad
}

// minDefinite is how many of a hundred operations must have a definite answer for a
// run to count.
const minDefinite = 80

// checkDefinite says whether enough outcomes are known for the other checks to mean
// anything.
func checkDefinite(ops []*Op) []string {
	definite, answered := 0, 0
	for _, o := range ops {
		if o.Definite() {
			definite++
		}
		if o.Outcome == Answered {
			answered++
		}
	}
	if len(ops) == 0 || definite*100 < len(ops)*minDefinite {
		return []string{fmt.Sprintf("definite: only %d of %d operations have a definite answer", definite, len(ops))}
	}
	if answered*2 < len(ops) {
		return []string{fmt.Sprintf("definite: only %d of %d operations succeeded", answered, len(ops))}
	}
	return nil
}

// maxGap is how many revisions a crashed sequencer may leave unused.
const maxGap = 10_000

// checkGaps checks that every revision from the first one on is used, except those that failures may leave
// unused. A stop of all nodes at once may skip revisions above rebooted, which was known
// before it; 0 says that there was none.
func checkGaps(ops []*Op, vs []Version, first int64, failures int, rebooted int64) []string {
	used := map[int64]bool{}
	for _, v := range vs {
		used[v.Mod] = true
	}
	last := Known(ops)
	if len(vs) > 0 {
		last = max(last, vs[len(vs)-1].Mod)
	}
	gaps, skipped := int64(0), int64(0)
	for rev := first; rev <= last; rev++ {
		switch {
		case used[rev]:
		case rebooted > 0 && rev > rebooted && skipped < maxGap:
			skipped++
		case failures == 0:
			return []string{fmt.Sprintf("gaps: nothing failed, and revision %d of %d bears no event", rev, last)}
		default:
			gaps++
		}
	}
	if gaps > int64(failures)*2*maxGap {
		return []string{fmt.Sprintf("gaps: %d revisions bear no event after %d failures", gaps, failures)}
	}
	return nil
}
