package config

import (
	"fmt"
	"strings"
)

// docs renders the table of flags as Markdown: the text of docs/flags.md.
func docs() string {
	var b strings.Builder
	b.WriteString(`# Flags

Rendered from the table in package config (go test ./config -run TestDocs -rewrite). A flag is written --NAME VALUE or
--NAME=VALUE, with one dash or two. Each one can also be given as an environment variable, SKEIN_NAME or ETCD_NAME in
capitals with underscores; a flag wins over SKEIN_NAME, and that over ETCD_NAME. An unknown flag is an error, an unknown
variable is logged. --config-file excludes flags and variables; its keys are the last column, a dot separates the levels,
and durations there are integer nanoseconds.

What Skein does with each flag of etcd 3.7:

- **honoured**: it does what etcd's does, up to the note.
- **meaningless here**: accepted and logged; the note says why.
- **not there yet**: the start is refused, unless the value is the default.
`)
	flags := Flags()
	for _, support := range []Support{Honoured, Meaningless, NotYet} {
		fmt.Fprintf(&b, "\n## %s%s\n\n", strings.ToUpper(support.String()[:1]), support.String()[1:])
		if support == Honoured {
			b.WriteString("| Flag | Default | Meaning | Key in the file |\n| --- | --- | --- | --- |\n")
		} else {
			b.WriteString("| Flag | Default | Why | Key in the file |\n| --- | --- | --- | --- |\n")
		}
		for _, section := range []string{
			sectionSkein, sectionMember, sectionClustering, sectionSecurity, sectionAuth, sectionLogging,
			sectionProfiling, sectionTracing, sectionFeatures, sectionUnsafe, sectionDiscovery, sectionRelics,
		} {
			for i := range flags {
				if flags[i].Support == support && flags[i].Section == section {
					b.WriteString(flags[i].row())
				}
			}
		}
	}
	return b.String()
}

func (f *Flag) row() string {
	text := strings.TrimSpace(f.Usage + " " + f.Note)
	def := ""
	if f.Default != "" {
		def = "`" + f.Default + "`"
	}
	file := ""
	if f.File != "" {
		file = "`" + f.File + "`"
	}
	return fmt.Sprintf("| `--%s` | %s | %s | %s |\n", f.Name, def, strings.ReplaceAll(text, "|", "\\|"), file)
}
