package adminapi

import (
	"context"
	"strings"
	"testing"

	"github.com/skeindb/skein/api/adminpb"
)

// The newest request comes first, those below the minimum are left out, and who does not answer is named.
func TestSlowRequestsAreListed(t *testing.T) {
	s := &server{backend: &fakeBackend{}}
	for _, c := range []struct {
		min    int64
		format Format
		want   string
	}{
		{0, Table, `
n3 does not answer: dead
n4 does not answer: no route
+--------------------------+------+-----------------------+-------+-------+---------+-----------------------------------------+
| AT                       | NODE | METHOD                | TOOK  | RANGE | RETRIES | CAUSE                                   |
+--------------------------+------+-----------------------+-------+-------+---------+-----------------------------------------+
| 2027-01-15T08:00:00.003Z | n1   | /etcdserverpb.KV/Range | 90ms  | 3     | 0       | evaluation in range 3: 90 ms            |
| 2027-01-15T08:00:00.002Z | ab   | /etcdserverpb.KV/Txn   | 412ms | 12    | 2       | quorum: node n3 last, 400 ms in range 12 |
| 2027-01-15T08:00:00.001Z | n1   | put                    | 60ms  | -     | 0       | no single stage                         |
`},
		{100_000, JSON, `{"calls":[{"at":"2027-01-15T08:00:00.002Z","node":"ab","method":"/etcdserverpb.KV/Txn","range":12,"took_us":412400,` +
			`"cause":"quorum: node n3 last, 400 ms in range 12","stages":[{"name":"queued","took_us":12400},{"name":"quorum","took_us":400000}],` +
			`"retries":2,"request_bytes":30,"response_bytes":40}],"missing":[{"node":"n3","reason":"dead"},{"node":"n4","reason":"no route"}]}`},
		{500_000, Table, "n3 does not answer: dead n4 does not answer: no route no slow requests"},
	} {
		r, err := s.Slow(context.Background(), &adminpb.SlowRequest{MinMicros: c.min})
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		if err := WriteSlow(&out, c.format, r); err != nil {
			t.Fatal(err)
		}
		if got := words(out.String()); got != words(c.want) {
			t.Errorf("from %d µs on:\n%s\nwant\n%s", c.min, out.String(), c.want)
		}
	}
}

// words leaves out how wide a table is.
func words(s string) string {
	var all []string
	for _, w := range strings.Fields(s) {
		if !strings.HasPrefix(w, "+--") {
			all = append(all, w)
		}
	}
	return strings.Join(all, " ")
}
