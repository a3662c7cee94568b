// Package results reads reports of loadtest and makes more of them. It compares two sides, with confidence intervals. It merges
// the reports of several generators into one. It shows reports on a page for a browser. It runs no load.
package results

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/skeindb/skein/loadtest"
)

const (
	// maxReportBytes bounds a file: a report of a day has 30 MB.
	maxReportBytes = 256 << 20
	// maxReports bounds the files of a side.
	maxReports = 1000
	// reportFormat is the format that is understood.
	reportFormat = 1
)

// Run is a report and where it comes from.
type Run struct {
	// Name is the file's, as it was given.
	Name string
	loadtest.Report
}

// Read reads a report of loadtest run or kubernetes.
func Read(name string) (Run, error) {
	run := Run{Name: name}
	file, err := os.Open(name)
	if err != nil {
		return run, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxReportBytes+1))
	if err != nil {
		return run, err
	}
	if len(text) > maxReportBytes {
		return run, fmt.Errorf("%s: more than %d bytes are no report", name, maxReportBytes)
	}
	if err := json.Unmarshal(text, &run.Report); err != nil {
		return run, fmt.Errorf("%s: no report of loadtest: %w", name, err)
	}
	if run.Format != reportFormat || run.Settings.Workload == "" {
		return run, fmt.Errorf("%s: no report of loadtest run or kubernetes in format %d; they write one with --json", name, reportFormat)
	}
	return run, nil
}

// ReadAll reads the reports of several files. A file that is named twice is an error: its run would count twice.
func ReadAll(names []string) (runs []Run, err error) {
	var wrong []error
	named := map[string]bool{}
	for _, name := range names {
		path, err := filepath.Abs(name)
		if err != nil {
			return nil, err
		}
		if named[path] {
			wrong = append(wrong, fmt.Errorf("%s: it is named twice; each report counts once", name))
			continue
		}
		named[path] = true
		run, err := Read(name)
		wrong = append(wrong, err)
		runs = append(runs, run)
	}
	return runs, errors.Join(wrong...)
}

// ReadSide reads the runs of one side of a comparison: files or patterns (etcd-*.json), separated by commas. The files of a
// pattern have the order of their names.
func ReadSide(side string) ([]Run, error) {
	var names []string
	for part := range strings.SplitSeq(side, ",") {
		found := []string{part}
		if strings.ContainsAny(part, "*?[") {
			var err error
			if found, err = filepath.Glob(part); err != nil {
				return nil, fmt.Errorf("%q: %w", part, err)
			}
			if len(found) == 0 {
				return nil, fmt.Errorf("%q: no file has such a name", part)
			}
			slices.Sort(found)
		}
		names = append(names, found...)
	}
	if len(names) > maxReports {
		return nil, fmt.Errorf("%q: %d files are more than %d", side, len(names), maxReports)
	}
	return ReadAll(names)
}
