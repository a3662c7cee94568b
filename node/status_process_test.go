package node_test

import (
	"bytes"
	"context"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
)

// The survey behind skein status works with all nodes, with one of three killed, and with two; the log of the node that is left
// names those that are gone, and has a last line.
func TestStatusOfKilledNodes(t *testing.T) {
	c := newProcesses(t)
	c.startAll()
	c.ready()
	var endpoints []string
	for _, p := range c.nodes {
		endpoints = append(endpoints, p.client)
	}
	// The one that lives is asked last.
	client, err := adminapi.NewClient([]string{endpoints[2], endpoints[1], endpoints[0]}, nil)
	if err != nil {
		t.Fatal(err)
	}
	status := func(want func(*adminpb.SurveyResponse, []adminapi.EndpointError) bool) string {
		t.Helper()
		var out bytes.Buffer
		for end := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			s, silent, err := client.Survey(ctx)
			cancel()
			out.Reset()
			if err == nil {
				if err := adminapi.WriteStatus(&out, adminapi.Table, s, silent, adminapi.Diagnose(s, silent)); err != nil {
					t.Fatal(err)
				}
			}
			switch {
			case err == nil && want(s, silent):
				return out.String()
			case time.Now().After(end):
				t.Fatalf("%v\n%s", err, &out)
			}
		}
	}
	status(func(s *adminpb.SurveyResponse, silent []adminapi.EndpointError) bool {
		return len(silent) == 0 && !s.GetStale() && len(s.GetOutages()) == 0 && s.GetLeaderless() == 0 && len(s.GetVersions().GetNodes()) == 3
	})
	c.nodes[2].kill()
	status(func(s *adminpb.SurveyResponse, silent []adminapi.EndpointError) bool {
		return len(silent) == 1 && !s.GetStale() && len(s.GetOutages()) == 0 && s.GetNodes()[2].GetNode().GetState() == adminapi.StateDead
	})
	c.nodes[1].kill()
	screen := status(func(s *adminpb.SurveyResponse, silent []adminapi.EndpointError) bool {
		return len(silent) == 2 && s.GetStale() && len(s.GetOutages()) == 2 && s.GetOutages()[1].GetRanges() == s.GetRanges()
	})
	t.Log("\n" + screen)
	for _, part := range []string{"NONE for the placement group", "n2 (silent for ", "n3 (silent for ", "3 nodes, 1 alive", "endpoint " + endpoints[2]} {
		if !strings.Contains(screen, part) {
			t.Errorf("the screen lacks %q", part)
		}
	}
	log := func() string {
		b, err := os.ReadFile(c.nodes[0].logPath())
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	said := func(part string) bool { return strings.Contains(log(), part) }
	for end := time.Now().Add(time.Minute); !said("no quorum for 4 ranges and the placement group: n2, n3 silent since "); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the log does not say that there is no quorum")
		}
	}
	if err := c.nodes[0].cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.nodes[0].exited:
	case <-time.After(time.Minute):
		t.Fatal("it does not stop")
	}
	all := strings.Split(strings.TrimSpace(log()), "\n")
	if last := all[len(all)-1]; !strings.Contains(last, "the node has stopped") {
		t.Errorf("the last line: %s", last)
	}
	if !said(`"peer":"n2 (`) {
		t.Error("no line of the log names n2")
	}
}
