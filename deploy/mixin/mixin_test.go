package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/skeindb/skein/internal/leftout"
)

// TestFiles: the files in git are those that the generator writes.
func TestFiles(t *testing.T) {
	all, err := files()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range all {
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s is not what go generate ./deploy/mixin writes (%v)", name, err)
		}
	}
	there, err := filepath.Glob("dashboards/*.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range there {
		if _, ok := all[filepath.ToSlash(name)]; !ok {
			t.Errorf("nothing writes %s any more: remove it", name)
		}
	}
}

// queries returns all queries by what they are for.
func queries() map[string]string {
	all := map[string]string{}
	for _, a := range alerts() {
		all["alert "+a.name] = query(a.expr)
	}
	for _, r := range rules() {
		all["rule "+r.record] = query(r.expr)
	}
	for _, d := range dashboards() {
		for _, r := range d.rows {
			for i := range r.panels {
				for _, target := range r.panels[i].targets {
					all[d.title+" / "+r.panels[i].title+" / "+target.legend] = target.expr
				}
			}
		}
	}
	return all
}

var (
	documented = regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\|.*$")
	selected   = regexp.MustCompile(`([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}`)
	word       = regexp.MustCompile(`[a-z]+_[a-z_]+[a-z]`)
)

// metricNames returns the names that docs/METRICS.md has, without those of etcd that are not there.
func metricNames(t *testing.T) map[string]bool {
	t.Helper()
	page, err := os.ReadFile("../../docs/METRICS.md")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{"up": true}
	for _, m := range documented.FindAllStringSubmatch(string(page), -1) {
		if !strings.Contains(m[0], "| no: ") {
			names[m[1]] = true
		}
	}
	if len(names) < 150 {
		t.Fatalf("docs/METRICS.md has only %d metrics", len(names))
	}
	return names
}

// TestQueries: each metric of each query is documented, and asked of Skein's jobs alone.
func TestQueries(t *testing.T) {
	names := metricNames(t)
	for what, q := range queries() {
		found := selected.FindAllStringSubmatch(q, -1)
		if len(found) == 0 {
			t.Errorf("%s asks for nothing: %s", what, q)
		}
		for _, m := range found {
			base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(m[1], "")
			if !names[m[1]] && !names[base] {
				t.Errorf("%s: docs/METRICS.md has no %s", what, m[1])
			}
			if !strings.HasPrefix(m[2], "job=") {
				t.Errorf("%s asks every job for %s", what, m[1])
			}
		}
		// A metric without braces would be of every job, and is not looked at above.
		for _, w := range word.FindAllString(selected.ReplaceAllString(q, ""), -1) {
			if names[w] {
				t.Errorf("%s asks every job for %s", what, w)
			}
		}
	}
}

// TestPanels: each dashboard can be read: titles, units, one id each, and names of series where there are several.
func TestPanels(t *testing.T) {
	uids := map[string]bool{}
	for _, d := range dashboards() {
		if uids[d.uid] || d.title == "" {
			t.Errorf("dashboard %q has the title %q, or its name twice", d.uid, d.title)
		}
		uids[d.uid] = true
		titles := map[string]bool{}
		for _, r := range d.rows {
			for i := range r.panels {
				p := &r.panels[i]
				if p.title == "" || titles[p.title] || !slices.Contains([]string{"short", "reqps", "s", "bytes", "Bps", "percentunit"}, p.unit) {
					t.Errorf("%s: panel %q (unit %q)", d.title, p.title, p.unit)
				}
				titles[p.title] = true
				for _, target := range p.targets {
					if !p.number && target.legend == "" {
						t.Errorf("%s: the series of %q have no names", d.title, p.title)
					}
				}
			}
		}
		panels, ok := d.grafana()["panels"].([]object)
		if !ok {
			t.Fatal("no panels")
		}
		taken, ids := map[[2]int]string{}, map[any]bool{}
		for _, p := range panels {
			at, ok := p["gridPos"].(object)
			title, isText := p["title"].(string)
			if !ok || !isText || ids[p["id"]] {
				t.Fatalf("%s: panel %v", d.title, p)
			}
			ids[p["id"]] = true
			x, y, w, h := at["x"].(int), at["y"].(int), at["w"].(int), at["h"].(int)
			for i := x; i < x+w; i++ {
				for j := y; j < y+h; j++ {
					if other := taken[[2]int{i, j}]; other != "" || i >= 24 {
						t.Fatalf("%s: %q lies over %q at %d, %d", d.title, title, other, i, j)
					}
					taken[[2]int{i, j}] = title
				}
			}
		}
	}
	if len(uids) != 5 {
		t.Errorf("%d dashboards", len(uids))
	}
}

// TestAlertsAreExplained: docs/MONITORING.md has a part for each alert, and for no other one.
func TestAlertsAreExplained(t *testing.T) {
	page, err := os.ReadFile("../../docs/MONITORING.md")
	if err != nil {
		t.Fatal(err)
	}
	explained := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^### (Skein\w+)$`).FindAllStringSubmatch(string(page), -1) {
		explained[m[1]] = true
	}
	for _, a := range alerts() {
		if !explained[a.name] {
			t.Errorf("docs/MONITORING.md does not say what to do at %s", a.name)
		}
		delete(explained, a.name)
	}
	for name := range explained {
		t.Errorf("docs/MONITORING.md explains %s, which is no alert", name)
	}
}

// TestPromtool: Prometheus takes the rules, and the alerts fire when they should.
func TestPromtool(t *testing.T) {
	promtool := leftout.Tool(t, "promtool", "prometheus")
	commands := [][]string{{"check", "rules", "alerts.yaml", "rules.yaml"}}
	if !testing.Short() { // a quarter of a minute of the processor's time
		commands = append(commands, []string{"test", "rules", "testdata/alerts_test.yaml"})
	}
	for _, args := range commands {
		out, err := exec.Command(promtool, args...).CombinedOutput()
		if err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	tests, err := os.ReadFile("testdata/alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range alerts() {
		if !strings.Contains(string(tests), `alertname="`+a.name+`"`) {
			t.Errorf("testdata/alerts_test.yaml does not test %s", a.name)
		}
	}
}

// TestLibsonnet: jsonnet makes of the mixin what the files have, with the user's selector.
func TestLibsonnet(t *testing.T) {
	jsonnet := leftout.Tool(t, "jsonnet", "jsonnet")
	out, err := exec.Command(jsonnet, "-e", `(import 'mixin.libsonnet') + { _config+:: { skeinSelector: 'job="mine"' } } + {
  alerts: $.prometheusAlerts, rules: $.prometheusRules, dashboards: $.grafanaDashboards }`).Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var made struct {
		Alerts, Rules struct {
			Groups []struct {
				Rules []struct{ Expr string }
			}
		}
		Dashboards map[string]struct{ Title string }
	}
	if err := json.Unmarshal(out, &made); err != nil {
		t.Fatal(err)
	}
	if len(made.Alerts.Groups) != 1 || len(made.Rules.Groups) != 1 || len(made.Dashboards) != len(dashboards()) {
		t.Fatalf("it has %d and %d groups and %d dashboards", len(made.Alerts.Groups), len(made.Rules.Groups), len(made.Dashboards))
	}
	for i, a := range alerts() {
		if got, want := made.Alerts.Groups[0].Rules[i].Expr, strings.ReplaceAll(query(a.expr), selector, `job="mine"`); got != want {
			t.Errorf("%s is %s", a.name, got)
		}
	}
}
