package config

import (
	"fmt"
	"slices"
	"strings"
)

// Usage renders the honoured flags for --help.
func Usage() string {
	var b strings.Builder
	flags := Flags()
	width := 0
	for i := range flags {
		width = max(width, len(flags[i].Name))
	}
	var seen []string
	for _, f := range flags {
		if f.Support == Honoured && !slices.Contains(seen, f.Section) {
			seen = append(seen, f.Section)
		}
	}
	for _, section := range seen {
		fmt.Fprintf(&b, "\n%s:\n", section)
		for _, f := range flags {
			if f.Support == Honoured && f.Section == section {
				fmt.Fprintf(&b, "  --%-*s  %s", width, f.Name, f.Usage)
				if f.Default != "" {
					fmt.Fprintf(&b, " (default %s)", f.Default)
				}
				b.WriteByte('\n')
			}
		}
	}
	b.WriteString("\nMore flags of etcd are accepted; docs/flags.md says what each of them does here.\n")
	return b.String()
}
