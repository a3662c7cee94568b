package results

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/skeindb/skein/loadtest"
)

// hostile would run a script, or end an attribute or a tag, wherever it is not escaped.
const hostile = `"'><script>alert(1)</script><img src=x onerror=alert(2)>{{.}}&amp;` + "`${x}"

// poison writes hostile text into every string below v, and into the keys of maps.
func poison(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() && v.CanSet() && v.Type().Elem().Kind() == reflect.Struct && v.Type() != reflect.TypeFor[*loadtest.Histogram]() && v.Type().Elem().PkgPath() == reflect.TypeFor[loadtest.Report]().PkgPath() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		if !v.IsNil() {
			poison(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); f.CanSet() {
				poison(f)
			}
		}
	case reflect.Slice:
		if v.Len() == 0 {
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		}
		for i := range v.Len() {
			poison(v.Index(i))
		}
	case reflect.Map:
		m := reflect.MakeMap(v.Type())
		value := reflect.New(v.Type().Elem()).Elem()
		for _, key := range v.MapKeys() {
			value.Set(v.MapIndex(key))
			m.SetMapIndex(key, value)
		}
		poison(value)
		m.SetMapIndex(reflect.ValueOf(hostile).Convert(v.Type().Key()), value)
		v.Set(m)
	case reflect.String:
		v.SetString(hostile)
	default:
	}
}

// TestPageEscapes: whatever a report's strings are, they are text on the page.
func TestPageEscapes(t *testing.T) {
	run := sample(t, "x", 1000, 2000)
	run.CPU.SelfSeconds = 40 // a warning
	run.Interrupted = true
	poison(reflect.ValueOf(&run.Report))
	run.Name = "dir/" + strings.ReplaceAll(hostile, "/", "")
	var out bytes.Buffer
	if err := WritePage(&out, []Run{run, run}); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	if run.Verify.First[0] != hostile || run.Versions.Servers[0].HTTP[hostile] != hostile || run.Histograms[hostile] == nil {
		t.Error("the report is not hostile enough")
	}
	if n := strings.Count(text, "&lt;script&gt;alert(1)&lt;/script&gt;"); n < 30 {
		t.Errorf("only %d strings of the report are on the page", n)
	}
	for _, bad := range []string{"<script", "<img", "onerror=alert(2)>", "javascript:", "ZgotmplZ", "<no value>"} {
		if i := strings.Index(text, bad); i >= 0 {
			t.Errorf("%q is on the page: …%s…", bad, text[max(0, i-80):min(len(text), i+80)])
		}
	}
	checkPage(t, text)
}

// checkPage looks whether the page needs nothing from elsewhere and its tags are closed.
func checkPage(t *testing.T, text string) {
	t.Helper()
	if found := regexp.MustCompile(`(?i)(\ssrc=|\shref=|url\(|@import)`).FindString(regexp.MustCompile(`(?s)>[^<]*<`).ReplaceAllString(text, "><")); found != "" {
		t.Errorf("the page needs something else: %q", found)
	}
	d := xml.NewDecoder(strings.NewReader(text))
	d.Strict, d.AutoClose, d.Entity = false, xml.HTMLAutoClose, xml.HTMLEntity
	open := []string{}
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch e := token.(type) {
		case xml.StartElement:
			open = append(open, e.Name.Local)
			for _, a := range e.Attr {
				if strings.Contains(a.Value, "NaN") || strings.Contains(a.Value, "Inf") {
					t.Errorf("<%s %s=%q>", e.Name.Local, a.Name.Local, a.Value)
				}
			}
		case xml.EndElement:
			if len(open) == 0 || open[len(open)-1] != e.Name.Local {
				t.Fatalf("</%s> ends %v", e.Name.Local, open)
			}
			open = open[:len(open)-1]
		}
	}
	if len(open) > 0 {
		t.Errorf("%v are not ended", open)
	}
}

// TestPage: what a reader looks for is there, and odd reports make a page too.
func TestPage(t *testing.T) {
	a, b := sample(t, "before.json", 1000, 2000), sample(t, "after.json", 2000, 900)
	b.Settings.Clients = 77
	b.SLO = []loadtest.Objective{{Clause: "p99<1ms", Figure: "3.60ms"}, {Clause: "p50<1ms", Figure: "900µs", Met: true}}
	var out bytes.Buffer
	if err := WritePage(&out, []Run{a, b}); err != nil {
		t.Fatal(err)
	}
	checkPage(t, out.String())
	for _, want := range []string{
		"Latency over time", "Throughput", "Percentiles", "Processor time", "before.json", "after.json", "not met</span> p99&lt;1ms: 3.60ms",
		`<tr class="differs"><td>settings.clients</td><td>1000</td><td>77</td></tr>`, `<td>machine.cpu</td><td>&#34;A CPU&#34;</td>`, "prefers-color-scheme: dark",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not on the page", want)
		}
	}
	if os.Getenv("SKEIN_KEEP_PAGE") != "" {
		if err := os.WriteFile(os.Getenv("SKEIN_KEEP_PAGE"), out.Bytes(), 0o600); err != nil {
			t.Error(err)
		}
	}
	empty := Run{Name: "empty"}
	one := sample(t, "one", 1, 1)
	one.Histograms = map[string]*loadtest.Histogram{"put": histogram(t, "1:1")}
	one.Seconds = []loadtest.Second{{At: 0.001, Length: 0.001, Operations: 1, PutP50: 1, PutP99: 1}}
	long := sample(t, "long", 1e6, 800_000_000)
	for i := range 100_000 {
		long.Seconds = append(long.Seconds, loadtest.Second{At: float64(i + 4), Length: 1, Operations: 1e6, P50: int64(i), P99: 3_600_000_000})
	}
	for _, runs := range [][]Run{{empty}, {one}, {long}, {empty, one, long, a, b}} {
		out.Reset()
		if err := WritePage(&out, runs); err != nil {
			t.Fatal(err)
		}
		checkPage(t, out.String())
		if out.Len() > 400_000 {
			t.Errorf("%d runs make a page of %d bytes", len(runs), out.Len())
		}
	}
	if err := WritePage(io.Discard, nil); err == nil {
		t.Error("a page of nothing")
	}
	if err := WritePage(io.Discard, make([]Run, 9)); err == nil || !strings.Contains(err.Error(), "9 reports") {
		t.Error(err)
	}
	if err := WritePageFile(filepath.Join(t.TempDir(), "no", "such"), []Run{a}); err == nil {
		t.Error("a page that cannot be written passes")
	}
}

// TestMarks: the axes have round numbers around the figures.
func TestMarks(t *testing.T) {
	for _, c := range []struct {
		high float64
		want string
	}{{3, "[0 1 2 3]"}, {10, "[0 2 4 6 8 10]"}, {1, "[0 0.2 0.4 0.6 0.8 1]"}, {1234, "[0 500 1000 1500]"}, {99, "[0 20 40 60 80 100]"}} {
		got, to := evenMarks(c.high)
		for i := range got {
			got[i] = float64(int(got[i]*1000+0.5)) / 1000
		}
		if fmt.Sprint(got) != c.want || to < c.high {
			t.Errorf("%g: %v to %g, want %s", c.high, got, to, c.want)
		}
	}
	for _, c := range []struct {
		low, high float64
		want      string
	}{{900, 15_000, "[500 1000 2000 5000 10000 20000]"}, {1, 1, "[1 2]"}, {120, 130, "[100 200]"}, {1, 3_000_000_000, "[1 10 100 1000 10000 100000 1e+06 1e+07 1e+08 1e+09 1e+10]"}} {
		got, from, to := logMarks(c.low, c.high)
		for i := range got {
			got[i] = float64(int(got[i] + 0.5))
		}
		if fmt.Sprint(got) != c.want || from > c.low*1.001 || to < c.high*0.999 {
			t.Errorf("%g to %g: %v, %g to %g, want %s", c.low, c.high, got, from, to, c.want)
		}
	}
}
