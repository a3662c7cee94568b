package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	if err := write("."); err != nil {
		fmt.Fprintln(os.Stderr, "mixin:", err)
		os.Exit(1)
	}
}

// write writes all files into a directory.
func write(dir string) error {
	all, err := files()
	if err != nil {
		return err
	}
	for name, text := range all {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// files returns the texts of all files by their names.
func files() (map[string]string, error) {
	all := map[string]string{"alerts.yaml": alertsFile(alerts()), "rules.yaml": rulesFile()}
	var names []string
	for _, d := range dashboards() {
		b, err := json.MarshalIndent(d.grafana(), "", "  ")
		if err != nil {
			return nil, err
		}
		all["dashboards/"+d.uid+".json"] = string(b) + "\n"
		names = append(names, d.uid)
	}
	all["mixin.libsonnet"] = libsonnet(names)
	return all, nil
}

// written is the head of each file that may have comments.
const written = "Written by go generate ./deploy/mixin."

// libsonnet is the mixin. Its selector replaces the one in the files.
func libsonnet(names []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `// %s
{
  _config+:: {
    // Which series are Skein's.
    skeinSelector: '%s',
  },
  local rules(text) = std.parseYaml(std.strReplace(text, '%[2]s', $._config.skeinSelector)),
  prometheusAlerts+:: { groups+: rules(importstr 'alerts.yaml').groups },
  prometheusRules+:: { groups+: rules(importstr 'rules.yaml').groups },
  grafanaDashboards+:: {
`, written, selector)
	for _, n := range names {
		fmt.Fprintf(&b, "    '%s.json': import 'dashboards/%s.json',\n", n, n)
	}
	b.WriteString("  },\n}\n")
	return b.String()
}
