package node_test

import (
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest"
)

// Clients read more at a time than a real node's memory budget holds, by gRPC. Nothing is refused, and
// a watcher gets its events.
func TestLargeReadsOfClients(t *testing.T) {
	c := newProcessesOf(t, 1)
	c.nodes[0].args = append(c.nodes[0].args, "--memory-budget-bytes", "67108864")
	c.startAll()
	c.ready()
	for _, load := range []loadtest.ReadsConfig{
		{Clients: 10, AnswerBytes: 5_000_000, ValueBytes: 50_000},
		{Clients: 4, AnswerBytes: 30_000_000, ValueBytes: 500_000}, // one may have 32 MiB
	} {
		load.Endpoint, load.Duration, load.Clock = c.nodes[0].client, time.Second, clock.System()
		report, err := loadtest.Reads(t.Context(), load)
		if err != nil {
			t.Fatal(err)
		}
		if report.Answers == 0 || len(report.Errors) > 0 || len(report.Late) == 0 {
			t.Errorf("%d clients: %d answers, errors %v, %d events", load.Clients, report.Answers, report.Errors, len(report.Late))
		}
	}
}
