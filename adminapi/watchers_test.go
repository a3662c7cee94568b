package adminapi

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/adminpb"
)

// Those furthest behind come first, page by page, and who does not answer is named.
func TestWatchersAreListed(t *testing.T) {
	b := &fakeBackend{}
	s := &server{backend: b}
	for _, c := range []struct {
		q      *adminpb.WatcherListRequest
		format Format
		asked  string
		want   string
	}{
		{&adminpb.WatcherListRequest{}, Table, `"" 100`, `
n3 does not answer: dead
n4 does not answer: no route
| NODE | CLIENT     | USER | KEY      | END       | FROM | FILTERS | BEHIND | QUEUED | EVENTS FROM | AGE   |
| n1   | 10.0.0.1:7 | u    | long…  | (none)    |      |         | 900    | 5      | memory      | 1m0s  |
| n1   | 10.0.0.1:7 | u    | "k\x00"  | (one key) | 12   |         | 900    | 4      | history     | 1m30s |
| n2   | 10.0.0.2:9 |      | /a/      | /a0       |      | noput   | 0      | 0      | memory      | 300ms |
1 to 3 of 30 watchers`},
		{&adminpb.WatcherListRequest{Limit: 1, Skip: 1, Node: "n1"}, JSON, `"n1" 2`, `{"watchers":[{"node":"n1","client":"10.0.0.1:7","user":"u","watch_id":3,` +
			`"key_base64":"awA=","start_revision":12,"behind_revisions":900,"queued_events":4,"queued_bytes":512,"reads_history":true,"age_ms":90000}],` +
			`"total":30,"missing":[{"node":"n3","reason":"dead"},{"node":"n4","reason":"no route"}]}`},
		{&adminpb.WatcherListRequest{Limit: 5, Skip: 2}, Table, `"" 7`, `
n3 does not answer: dead
n4 does not answer: no route
| NODE | CLIENT     | USER | KEY | END | FROM | FILTERS | BEHIND | QUEUED | EVENTS FROM | AGE   |
| n2   | 10.0.0.2:9 |      | /a/ | /a0 |      | noput   | 0      | 0      | memory      | 300ms |
3 to 3 of 30 watchers`},
		{&adminpb.WatcherListRequest{Limit: 1000, Skip: 9000}, Table, `"" 10000`, "n3 does not answer: dead n4 does not answer: no route no watchers"},
	} {
		r, err := s.WatcherList(context.Background(), c.q)
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		if err := WriteWatchers(&out, &out, c.format, QuotedKeys, r, int(c.q.GetSkip())); err != nil {
			t.Fatal(err)
		}
		if got := words(out.String()); got != words(c.want) || b.watchers != c.asked {
			t.Errorf("asked for %s:\n%s\nwant %s:\n%s", b.watchers, out.String(), c.asked, c.want)
		}
	}
	for _, q := range []*adminpb.WatcherListRequest{{Limit: 1001}, {Limit: 1000, Skip: 9001}, {Skip: 1<<32 - 1, Limit: 1<<32 - 1}} {
		if r, err := s.WatcherList(context.Background(), q); err == nil || !strings.Contains(status.Convert(err).Message(), "are asked for") {
			t.Errorf("%v: %v, %v", q, r, err)
		}
	}
	b.err = &Refusal{Reason: "there is no node"}
	if _, err := s.WatcherList(context.Background(), &adminpb.WatcherListRequest{}); err == nil || errors.Is(err, b.err) {
		t.Errorf("a refusal on the wire: %v", err)
	}
}
