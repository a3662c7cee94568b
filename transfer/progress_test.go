package transfer

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// Lines come every five seconds, and to a terminal much more often: the last one is shown there.
func TestTeller(t *testing.T) {
	for _, c := range []struct {
		terminal bool
		want     []string
	}{
		{false, []string{"50 done, after 5s", "100 done, after 10s"}},
		{true, nil},
	} {
		synctest.Test(t, func(t *testing.T) {
			var reports, lines []string
			cluster := &Cluster{Report: func(format string, args ...any) { reports = append(reports, fmt.Sprintf(format, args...)) }}
			if c.terminal {
				cluster.Progress = func(text string) { lines = append(lines, text) }
			}
			teller := cluster.teller()
			for i := 1; i <= 100; i++ {
				time.Sleep(100 * time.Millisecond)
				teller.say("%d done", i)
			}
			if !slices.Equal(reports, c.want) {
				t.Errorf("reports %q", reports)
			}
			if c.terminal && (len(lines) != 50 || lines[49] != "100 done, after 10s") {
				t.Errorf("%d lines: %q", len(lines), lines)
			}
		})
	}
}
