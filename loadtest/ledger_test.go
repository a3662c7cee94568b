package loadtest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// TestLedger tells stories of promises and findings. Commands, one per line, with a
// key's number:
//
//	begin key=1 as=a        an operation is about to be sent; its floor is called a
//	ack key=1 op=1 floor=a rev=5
//	lost key=1 op=2         a put's answer never came
//	read key=1 floor=a rev=7 [op=1 mod=5] [foreign] [torn]
//	final key=1 [op=1 mod=5] [foreign] [torn]
//
// Each prints the violations that it has found.
func TestLedger(t *testing.T) {
	datadriven.Walk(t, "testdata/ledger", func(t *testing.T, path string) {
		v := newValues(1, 32)
		l := newLedger(1000, v)
		floors := map[string]floor{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			for _, line := range strings.Split(d.Input, "\n") {
				before, _ := l.violations()
				said := ledgerCommand(t, l, v, floors, line)
				after, told := l.violations()
				fmt.Fprintf(&out, "%s:%s", line, said)
				if after == before {
					out.WriteString(" ok\n")
				} else {
					fmt.Fprintf(&out, "\n  VIOLATION %s\n", strings.Join(told[before:after], "\n  VIOLATION "))
				}
			}
			return out.String()
		})
	})
}

func ledgerCommand(t *testing.T, l *ledger, v *values, floors map[string]floor, line string) string {
	t.Helper()
	words := strings.Fields(line)
	arg := map[string]string{}
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		arg[key] = value
	}
	number := func(name string) (n int64) {
		if _, err := fmt.Sscan(arg[name], &n); err != nil {
			t.Fatalf("%s: %s: %v", line, name, err)
		}
		return n
	}
	key := uint64(number("key"))
	var found *mvccpb.KeyValue
	if arg["mod"] != "" {
		found = &mvccpb.KeyValue{Value: make([]byte, 32), ModRevision: number("mod")}
		if _, foreign := arg["foreign"]; !foreign {
			v.put(found.Value, opID(number("op")))
		}
		if _, torn := arg["torn"]; torn {
			found.Value[31] ^= 1
		}
	}
	switch words[0] {
	case "begin":
		floors[arg["as"]] = l.begin(key)
	case "ack":
		l.acknowledged(key, opID(number("op")), floors[arg["floor"]], number("rev"))
	case "lost":
		l.unknownFate(key, opID(number("op")))
	case "read":
		l.read(key, floors[arg["floor"]], number("rev"), found)
	case "final":
		return fmt.Sprintf(" acknowledged=%v", l.final(key, found))
	default:
		t.Fatalf("no command %q", words[0])
	}
	return ""
}
