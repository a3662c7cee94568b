package apiserver

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// The suite waits for an event no longer than 150 ms. If this process, which sleeps for
// stillLook again and again, is late by half of that, no server on this machine could
// have kept the time. A test that failed meanwhile proves nothing and is run again. A
// test that failed while the machine ran is not.
const (
	stillLook  = 5 * time.Millisecond
	stillLeast = 75 * time.Millisecond
	// stillTurns is how often a test is run again at most.
	stillTurns = 3
)

// standstills are the times in which the machine stood still for this process.
type standstills struct {
	mu   sync.Mutex
	when []span
}

func (s *standstills) watch(ctx context.Context) {
	look := time.NewTicker(stillLook)
	defer look.Stop()
	for before := time.Now(); ; {
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
		now := time.Now()
		if now.Sub(before) >= stillLook+stillLeast {
			s.mu.Lock()
			s.when = append(s.when, span{before, now})
			s.mu.Unlock()
		}
		before = now
	}
}

// during says whether the machine stood still meanwhile.
func (s *standstills) during(t span) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.when, func(w span) bool { return w.from.Before(t.to) && t.from.Before(w.to) })
}

// repeat runs those failed tests again, alone, during which the machine stood still. It
// removes from r those that then pass.
func (s *standstills) repeat(t *testing.T, r *results, again func(pkg, pattern string) (*results, error)) {
	t.Helper()
	r.failed = slices.DeleteFunc(r.failed, func(name string) bool {
		pkg, test, whole := cutName(name)
		if whole {
			return false
		}
		for when := r.ran[name]; s.during(when); {
			t.Logf("%s: failed from %s to %s while the machine stood still, and is run again:\n%s",
				name, when.from.Format(time.TimeOnly), when.to.Format(time.TimeOnly), r.text[name])
			one, err := again(pkg, pattern(test))
			if err != nil {
				t.Errorf("%s: %v", name, err)
				return false
			}
			if len(one.failed) == 0 && one.passed > 0 {
				r.passed++
				return true
			}
			r.again[name]++
			if when = one.ran[name]; r.again[name] == stillTurns {
				break
			}
			r.text[name] = one.text[name]
		}
		return false
	})
}

// cutName splits a name of results into package and test, unless it is a whole package.
func cutName(name string) (pkg, test string, whole bool) {
	dir := strings.LastIndex(name[:strings.IndexByte(name+".", '.')], "/") + 1
	pkg, test, found := strings.Cut(name[dir:], ".")
	return name[:dir] + pkg, test, !found
}

// pattern is go test's -run pattern for exactly this test.
func pattern(test string) string {
	parts := strings.Split(test, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

func TestPatternsOfTests(t *testing.T) {
	pkg, test, whole := cutName("pkg/storage/etcd3.TestWatch/RV=0,_no.initial/x")
	if pkg != "pkg/storage/etcd3" || test != "TestWatch/RV=0,_no.initial/x" || whole {
		t.Errorf("%q, %q, %v", pkg, test, whole)
	}
	if p := pattern(test); p != `^TestWatch$/^RV=0,_no\.initial$/^x$` {
		t.Error(p)
	}
	if _, _, whole := cutName("pkg/storage/etcd3"); !whole {
		t.Error("a package is taken for a test")
	}
}

// A test that fails is run again if the machine stood still meanwhile, and counts as failed
// else; who fails each time has failed.
func TestRunAgainAfterAStandstill(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	s := standstills{when: []span{{at(10), at(11)}}}
	r := newResults()
	r.failed = []string{"p.TestA", "p.TestB", "p.TestC", "q"}
	r.ran = map[string]span{"p.TestA": {at(9), at(12)}, "p.TestB": {at(2), at(9)}, "p.TestC": {at(1), at(11)}, "q": {at(1), at(20)}}
	asked := 0
	s.repeat(t, r, func(pkg, pattern string) (*results, error) {
		asked++
		one := newResults()
		switch pkg + " " + pattern {
		case "p ^TestA$":
			one.passed = 1
		case "p ^TestC$":
			one.failed, one.ran["p.TestC"] = []string{"p.TestC"}, span{at(10), at(12)}
		default:
			t.Errorf("%s %s was run again", pkg, pattern)
		}
		return one, nil
	})
	if !slices.Equal(r.failed, []string{"p.TestB", "p.TestC", "q"}) || r.passed != 1 || asked != 1+stillTurns {
		t.Errorf("failed %v, passed %d, %d run again", r.failed, r.passed, asked)
	}
}
