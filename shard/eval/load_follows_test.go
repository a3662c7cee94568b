package eval

import (
	"strings"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// TestFollows: a version of a load is taken only if it is the next one of its key, as its create revision and number say.
func TestFollows(t *testing.T) {
	live := func(mod, create, version int64) mvcc.Version {
		return mvcc.Version{Key: []byte("k"), Mod: keyspace.Revision(mod), Create: keyspace.Revision(create), Version: version}
	}
	dead := func(mod int64) mvcc.Version {
		return mvcc.Version{Key: []byte("k"), Mod: keyspace.Revision(mod), Tombstone: true}
	}
	after := func(v mvcc.Version, earlier mvcc.Version) mvcc.Version {
		v.Earlier = &earlier
		return v
	}
	for name, c := range map[string]struct {
		was, v mvcc.Version
		wrong  string
	}{
		"the first":                       {mvcc.Version{}, live(5, 5, 1), ""},
		"the second":                      {live(3, 3, 1), live(5, 3, 2), ""},
		"the first after an end":          {dead(3), live(5, 5, 1), ""},
		"an end":                          {live(3, 3, 1), dead(5), ""},
		"an end and a put":                {live(3, 2, 2), after(live(5, 5, 1), dead(5)), ""},
		"a put and an end":                {mvcc.Version{}, after(dead(5), live(5, 5, 1)), ""},
		"one is missing":                  {live(3, 3, 1), live(5, 3, 3), "version 3 since revision 3, and would be version 2 since revision 3"},
		"it was created anew":             {live(3, 3, 1), live(5, 4, 2), "version 2 since revision 4, and would be version 2 since revision 3"},
		"it should be there":              {mvcc.Version{}, live(5, 3, 2), "would be version 1 since revision 5"},
		"it should not be there":          {live(3, 3, 1), live(5, 5, 1), "would be version 2 since revision 3"},
		"its end was missed":              {dead(3), live(5, 2, 2), "would be version 1 since revision 5"},
		"the end of nothing":              {mvcc.Version{}, dead(5), "deletes it, and there is no such key"},
		"the end of what has ended":       {dead(3), dead(5), "deletes it, and there is no such key"},
		"an end that was none, and a put": {mvcc.Version{}, after(live(5, 5, 1), dead(5)), "deletes it, and there is no such key"},
		"a put that did not end it":       {live(3, 3, 1), after(live(5, 5, 1), live(5, 3, 2)), "would be version 3 since revision 3"},
	} {
		err := follows(c.was, &c.v)
		if (err == nil) != (c.wrong == "") || err != nil && (kverror.Of(err).Kind != kverror.NotNext || !strings.Contains(err.Error(), c.wrong)) {
			t.Errorf("%s: %v, want %q", name, err, c.wrong)
		}
	}
}
