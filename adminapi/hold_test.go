package adminapi

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

// Holds are listed with the oldest first, and one is ended by its id.
func TestHolds(t *testing.T) {
	b := &fakeBackend{}
	c, stop := serve(t, b)
	defer stop()
	show := func(format Format) string {
		t.Helper()
		l, err := c.HoldList(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := WriteHolds(&out, &out, format, l); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	table := show(Table)
	lines := strings.Split(table, "\n")
	for i, want := range []string{
		"HOLD KIND OWNER REVISION BEHIND SINCE EXPIRES",
		"00000000000000b0 backup db7, process 12 40 10 2027-01-15T08:00:00Z 2027-01-15T09:00:00Z",
		"00000000000000b1 snapshot node a1 50 0 2027-01-15T08:01:00Z 2027-01-15T09:01:00Z",
	} {
		found := false
		for _, l := range lines {
			found = found || strings.Join(strings.Fields(strings.ReplaceAll(l, "|", " ")), " ") == want
		}
		if !found {
			t.Errorf("line %d, %q, is missing in\n%s", i, want, table)
		}
	}
	if strings.Index(table, "b0 ") > strings.Index(table, "b1 ") {
		t.Errorf("the oldest is not the first:\n%s", table)
	}
	b.stale = true
	if j := show(JSON); strings.Contains(j, "behind") || !strings.Contains(j, `"id":"00000000000000b0"`) || !strings.Contains(j, `"stale":true`) {
		t.Error(j)
	}
	if !strings.HasPrefix(show(Table), staleHoldsNote+"\n") || strings.Contains(table, "stale") {
		t.Errorf("before and without a quorum:\n%s%s", table, show(Table))
	}
	b.stale, b.empty = false, true
	if got := show(Table); got != "no holds: compactions remove old versions\n" {
		t.Error(got)
	}
	if got := show(JSON); strings.TrimSpace(got) != "[]" {
		t.Error(got)
	}
	b.empty = false
	h, err := c.HoldRelease(t.Context(), "00000000000000b0")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := WriteReleased(&out, Table, h); err != nil || out.String() != "released hold 00000000000000b0 of revision 40: backup of db7, process 12\n" {
		t.Error(out.String(), err)
	}
	var r *Refusal
	if _, err := c.HoldRelease(t.Context(), "b7"); !errors.As(err, &r) || r.Reason != `release hold "b7": there is no such hold` || r.NextStep == "" {
		t.Error(err)
	}
}
