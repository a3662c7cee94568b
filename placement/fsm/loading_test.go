package fsm

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// loadStory is a state of a new cluster whose entries the test writes.
type loadStory struct {
	t     *testing.T
	s     *State
	r     records
	index uint64
}

func newLoadStory(t *testing.T) *loadStory {
	t.Helper()
	h := &loadStory{t, bootstrapped(t), records{}, firstIndex}
	h.s.ClusterVersion = keyspace.VersionData
	h.s.dirty.meta = true
	return h
}

// apply applies an entry. The state is the same when it is written and loaded again.
func (h *loadStory) apply(op Effect) Result {
	h.t.Helper()
	h.index++
	r := h.s.Apply(h.index, op)
	if err := h.s.Flush(h.r); err != nil {
		h.t.Fatal(err)
	}
	again := h.r.reload(h.t)
	if !reflect.DeepEqual(again.loading, h.s.loading) || again.meta != h.s.meta || printLeases(again) != printLeases(h.s) || again.leases.bytes != h.s.leases.bytes {
		h.t.Fatalf("loaded again: %+v, %+v, written %+v, %+v", again.loading, again.meta, h.s.loading, h.s.meta)
	}
	return r
}

func (h *loadStory) must(op Effect) *Loading {
	h.t.Helper()
	r := h.apply(op)
	if r.Err != nil {
		h.t.Fatal(r.Err)
	}
	return r.Loading
}

// refused checks that an entry is refused with an error of the kind that has the text, and changes nothing.
func (h *loadStory) refused(op Effect, kind kverror.Kind, text string) {
	h.t.Helper()
	before, leases := h.s.meta, printLeases(h.s)
	l := h.s.loading
	err := kverror.Of(h.apply(op).Err)
	if err == nil || err.Kind != kind || !strings.Contains(err.Error(), text) {
		h.t.Errorf("%+v: %v, want %s with %q", op, err, kind, text)
	}
	if h.s.meta != before || printLeases(h.s) != leases || h.s.loading != l {
		h.t.Errorf("%+v was refused and has changed %+v to %+v", op, before, h.s.meta)
	}
}

// A load goes from its begin to its finish. Nothing else is written meanwhile, each step can be repeated, and another
// loader is told whose load it is (trap 123).
func TestLoading(t *testing.T) {
	h := newLoadStory(t)
	begin := ChangeLoad{Step: LoadBegin, Nonce: 7, Source: "a.db", Now: 1000}
	l := h.must(begin)
	if l.Phase != PhaseBulk || uint64(l.Incarnation) != h.index || !l.Active() {
		t.Fatalf("begun: %+v", l)
	}
	if again := h.must(begin); again != l {
		t.Errorf("begun again: %+v", again)
	}
	for _, step := range []LoadStep{LoadBegin, LoadAdvance, LoadGrant, LoadRegister, LoadFinish, LoadAbandon} {
		h.refused(ChangeLoad{Step: step, Nonce: 8, Source: "b.db", Phase: PhaseFollow, Position: 9}, kverror.BadRequest, "belongs to the load of a.db by loader 0000000000000007, begun at 1970-01-01T00:00:01Z")
	}
	for _, op := range []Effect{
		RaiseCeiling{To: 10},
		Compact{At: 1},
		GrantLease{ID: 1, TTL: 9},
		RegisterLease{ID: 1},
		RevokeLeases{},
		RevokeChecked{At: 1},
		ChangeAccess{Change: rights.Change{Kind: rights.AddUser, User: "root"}},
		BeginOperation{Operation: Operation{Kind: OperationMerge}},
		Guarded{Permit: 1 << 40, Op: Compact{At: 1}},
	} {
		h.refused(op, kverror.Loading, "by a mirror, an import or a restore; it is in phase bulk, at revision 0")
	}
	if err := h.s.loading.Err(); strings.Contains(err.Error(), "a.db") {
		t.Errorf("every client is told the source: %v", err)
	}
	h.must(ChangeLoad{Step: LoadGrant, Nonce: 7, Leases: []LoadedLease{{ID: 3, TTL: 60}, {ID: 4, TTL: 70}, {ID: -5, TTL: 80}}})
	h.must(ChangeLoad{Step: LoadRevoke, Nonce: 7, Leases: []LoadedLease{{ID: 4}, {ID: 99}}})
	h.refused(ChangeLoad{Step: LoadRegister, Nonce: 7, Leases: []LoadedLease{{ID: 3}, {ID: 4}}}, kverror.LeaseNotFound, "lease 4")
	h.refused(ChangeLoad{Step: LoadGrant, Nonce: 7, Leases: []LoadedLease{{ID: 6, TTL: 60}, {ID: 8}}}, kverror.BadRequest, "TTL of 0")
	span, right := keyspace.Span{Start: []byte("a"), End: []byte("m")}, keyspace.Span{Start: []byte("m")}
	register := ChangeLoad{Step: LoadRegister, Nonce: 7, Leases: []LoadedLease{{ID: 3, Spans: []keyspace.Span{span}}, {ID: 3, Spans: []keyspace.Span{right}}}}
	h.must(register)
	h.must(register)
	if lease, ok := h.s.leases.get(3); !ok || !lease.Covers(span) || !lease.Covers(right) || len(lease.Spans) != 2 || lease.Incarnation != l.Incarnation {
		t.Errorf("lease 3: %+v", lease)
	}

	h.refused(ChangeLoad{Step: LoadAdvance, Nonce: 7, Phase: PhaseFollow}, kverror.BadRequest, "cannot go on")
	h.must(ChangeLoad{Step: LoadAdvance, Nonce: 7, Phase: PhaseFollow, Position: 100})
	h.refused(ChangeLoad{Step: LoadAdvance, Nonce: 7, Phase: PhaseFollow, Position: 99}, kverror.BadRequest, "cannot go on")
	h.refused(ChangeLoad{Step: LoadAdvance, Nonce: 7, Phase: PhaseBulk}, kverror.BadRequest, "cannot go on")
	h.refused(ChangeLoad{Step: LoadFinish, Nonce: 7, Position: 99}, kverror.BadRequest, "cannot finish at revision 99")
	h.refused(ChangeLoad{Step: LoadFinish, Nonce: 7, Position: 120, Compacted: 121}, kverror.BadRequest, "compacted 121")
	if told := h.s.TakeLeaseChanges(); len(told) > 0 {
		t.Errorf("clocks of %d leases run while the cluster is loaded", len(told))
	}
	finish := ChangeLoad{Step: LoadFinish, Nonce: 7, Position: 120, Compacted: 50}
	if l = h.must(finish); l.Active() || h.s.Ceiling != 120 || h.s.Compacted != 50 {
		t.Errorf("finished: %+v, ceiling %d, compacted %d", l, h.s.Ceiling, h.s.Compacted)
	}
	if told := h.s.TakeLeaseChanges(); len(told) != 2 {
		t.Errorf("the clocks of %d leases start, want 2", len(told))
	}
	h.must(finish)
	h.refused(ChangeLoad{Step: LoadAdvance, Nonce: 7, Phase: PhaseFollow, Position: 130}, kverror.BadRequest, "is finished")
	if l = h.must(begin); l.Phase != PhaseFinished || l.Position != 120 {
		t.Errorf("begun again by its loader, whose answer was lost: %+v", l)
	}
	other := begin
	other.Nonce++
	h.refused(other, kverror.BadRequest, "belongs to the load")
	h.must(RaiseCeiling{To: 10_120})
	h.must(GrantLease{ID: 1, TTL: 9})
}

// An abandoned load never serves.
func TestLoadingAbandoned(t *testing.T) {
	h := newLoadStory(t)
	h.refused(ChangeLoad{Step: LoadAbandon, Nonce: 7}, kverror.BadRequest, "no load has begun")
	h.must(ChangeLoad{Step: LoadBegin, Nonce: 7, Source: "a.db"})
	for range 2 {
		if l := h.must(ChangeLoad{Step: LoadAbandon, Nonce: 7}); !l.Active() {
			t.Errorf("abandoned: %+v", l)
		}
	}
	h.refused(ChangeLoad{Step: LoadFinish, Nonce: 7, Position: 9}, kverror.BadRequest, "is abandoned")
	h.refused(RaiseCeiling{To: 100}, kverror.Loading, "make a new one")
}

// Only an empty cluster can be loaded.
func TestLoadingNeedsAnEmptyCluster(t *testing.T) {
	for text, first := range map[string]Effect{
		"revisions up to 10000": RaiseCeiling{To: 10_000},
		"1 leases":              GrantLease{ID: 1, TTL: 9},
		"users or roles":        ChangeAccess{Change: rights.Change{Kind: rights.AddUser, User: "root", NoPassword: true}},
	} {
		h := newLoadStory(t)
		if r := h.apply(first); r.Err != nil {
			t.Fatal(r.Err)
		}
		h.refused(ChangeLoad{Step: LoadBegin, Nonce: 7}, kverror.BadRequest, text)
	}
	h := newLoadStory(t)
	h.s.ClusterVersion = keyspace.VersionData - 1
	h.refused(ChangeLoad{Step: LoadBegin, Nonce: 7}, kverror.BadRequest, "upgrade")
}

// someRights are users and roles of a source: one role is too large for one step.
func someRights(t *testing.T, enabled bool, users ...string) *rights.State {
	t.Helper()
	s := rights.New()
	for _, name := range users {
		s.PutUser(&rights.User{Name: name, Hash: []byte("hash of " + name), Roles: []string{"big", "root"}, Since: 1 << 40})
	}
	big := &rights.Role{Name: "big"}
	for i := range 5000 {
		big.Permissions = append(big.Permissions, rights.Permission{Type: rights.Write, Key: fmt.Appendf(nil, "%0100d", i/2), RangeEnd: fmt.Appendf(nil, "%0100d", i+3)})
	}
	s.PutRole(big)
	s.PutRole(&rights.Role{Name: "root"})
	s.Enabled, s.Revision, s.Access, s.EnabledSince = enabled, 77, 1<<40, 1<<40
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	return s
}

// bring brings users and roles, each piece twice.
func (h *loadStory) bring(set AccessSet, s *rights.State) {
	h.t.Helper()
	pieces := AccessPieces(s)
	if len(pieces) < 3 {
		h.t.Fatalf("%d pieces", len(pieces))
	}
	for _, rows := range pieces {
		o := ChangeLoad{Step: LoadAccess, Nonce: 7, Set: set, Access: rows, Key: []byte("secret")}
		if n := len(AppendChangeLoad(nil, &o)); n > 2*MaxAccessPiece {
			h.t.Errorf("a step of %d bytes", n)
		}
		h.must(o)
		h.must(o)
	}
}

// sameRights checks that the state has the users and roles, with indexes of its own, and that they are stored.
func (h *loadStory) sameRights(want *rights.State) {
	h.t.Helper()
	if err := h.s.access.Check(); err != nil {
		h.t.Error(err)
	}
	for _, got := range []*rights.State{h.s.access, h.r.reload(h.t).access} {
		own := want.Clone()
		own.EnabledSince, own.Access = got.EnabledSince, got.Access
		for _, u := range got.Users() {
			if w := want.User(u.Name); w != nil {
				next := *w
				next.Since = u.Since
				own.PutUser(&next)
			}
			if u.Since > h.index {
				h.t.Errorf("user %s is there since index %d of %d", u.Name, u.Since, h.index)
			}
		}
		if got.String() != own.String() || !reflect.DeepEqual(got.Users(), own.Users()) || got.Access > h.index || got.EnabledSince > h.index {
			h.t.Errorf("users and roles:\n%.2000s\nwant\n%.2000s", got, own)
		}
	}
}

// A load brings users and roles as the source has them. They are checked before the cluster serves anybody. Each piece
// can come twice, and others take their place if the source has others by now.
func TestLoadingAccess(t *testing.T) {
	h := newLoadStory(t)
	h.must(ChangeLoad{Step: LoadBegin, Nonce: 7, Source: "a.db", Now: 1000})
	first, second := someRights(t, true, "alice", "root"), someRights(t, true, "bob", "root")
	pieces := AccessPieces(first)
	h.must(ChangeLoad{Step: LoadAccess, Nonce: 7, Set: 1, Access: pieces[0]}) // its loader dies here
	h.bring(1, first)
	h.sameRights(first)
	if !h.s.access.Enabled || string(h.s.accessKey) != "secret" || h.s.access.EnabledSince == 0 || h.s.access.Access < h.s.access.EnabledSince {
		t.Errorf("users are not checked: %+v", h.s.access.Meta)
	}
	before := h.s.access.Access
	h.bring(2, second)
	h.sameRights(second)
	if h.s.access.Access <= before {
		t.Errorf("access index %d after others were taken away, and %d before", h.s.access.Access, before)
	}

	h.refused(ChangeLoad{Step: LoadFinish, Nonce: 7, Position: 120, Set: 1}, kverror.BadRequest, "bring users and roles again")
	h.refused(ChangeLoad{Step: LoadFinish, Nonce: 7, Position: 120}, kverror.BadRequest, "bring users and roles again")
	h.refused(ChangeLoad{Step: LoadAccess, Nonce: 8, Set: 1, Access: pieces[0]}, kverror.BadRequest, "belongs to the load")
	h.refused(ChangeLoad{Step: LoadAccess, Nonce: 7, Access: pieces[0]}, kverror.BadRequest, "no set")
	h.refused(ChangeLoad{Step: LoadAccess, Nonce: 7, Set: 2, Access: []AccessRow{{Key: []byte("x")}}}, kverror.BadRequest, "under key 78")
	h.refused(ChangeLoad{Step: LoadAccess, Nonce: 7, Set: 3, Access: pieces[len(pieces)-1]}, kverror.BadRequest, "checks are on")
	h.sameRights(second)

	finish := ChangeLoad{Step: LoadFinish, Nonce: 7, Position: 120, Set: 2}
	h.must(finish)
	h.must(finish)
	h.sameRights(second)
	h.refused(ChangeLoad{Step: LoadAccess, Nonce: 7, Set: 2, Access: pieces[0]}, kverror.BadRequest, "is finished")
	if r := h.apply(ChangeAccess{Change: rights.Change{Kind: rights.AddUser, User: "mallory", NoPassword: true}}); r.Err == nil {
		t.Error("somebody without a name has made a user")
	}
}

// A load that is begun again without users, or with users that are not checked, finishes so.
func TestLoadingWithoutAccess(t *testing.T) {
	h := newLoadStory(t)
	h.must(ChangeLoad{Step: LoadBegin, Nonce: 7, Source: "a.db", Now: 1000})
	h.bring(1, someRights(t, true, "root"))
	unchecked := someRights(t, false, "carol")
	h.bring(2, unchecked)
	h.sameRights(unchecked)
	h.must(ChangeLoad{Step: LoadAccess, Nonce: 7})
	h.sameRights(rights.New())
	h.must(ChangeLoad{Step: LoadFinish, Nonce: 7, Position: 120})
	h.must(ChangeAccess{Change: rights.Change{Kind: rights.AddUser, User: "anybody", NoPassword: true}})
}
