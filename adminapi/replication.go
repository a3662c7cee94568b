package adminapi

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
)

// SetReplication has each range get so many voters, or with dryRun only says what that would
// mean. Asking twice is harmless.
func (c *Client) SetReplication(ctx context.Context, factor int, dryRun bool) (*adminpb.PlacementSetReplicationResponse, error) {
	return call(ctx, c, &adminpb.PlacementSetReplicationRequest{Factor: int64(factor), DryRun: dryRun}, adminpb.AdminClient.PlacementSetReplication)
}

// WaitReplication is how a command waits for the ranges to have as many voters as they are
// to have.
type WaitReplication struct {
	// Call bounds one question, Pause lies between two of them.
	Call, Pause time.Duration
	// Tell is called whenever it is farther than before.
	Tell func(*adminpb.Replication)
}

// AwaitReplication waits until each range has so many voters. It changes nothing, and may be
// called again at any time. It ends with ctx, and where somebody sets another number.
func (c *Client) AwaitReplication(ctx context.Context, w WaitReplication, factor int) (*adminpb.Replication, error) {
	told, failed := "nobody could say how far it is", 0
	for {
		asked, cancel := context.WithTimeout(ctx, w.Call)
		p, err := c.PlacementShow(asked)
		cancel()
		if err == nil && p.GetStale() {
			err = &Refusal{Reason: stalePlacementNote, NextStep: "look with skein node list which nodes are down: a quorum is needed", Later: true}
		}
		r := p.GetReplication()
		switch {
		case err != nil && ctx.Err() == nil:
			if failed++; failed == maxFailedLooks {
				return nil, err
			}
		case err != nil || r == nil:
		case r.GetFactor() != int64(factor):
			return nil, &Refusal{
				Reason:   fmt.Sprintf("ranges are to have %d voters by now: somebody has set that", r.GetFactor()),
				NextStep: "repeat the command if it is still to be done",
			}
		default:
			failed = 0
			if text := ReplicationProgress(r); text != told {
				told = text
				w.Tell(r)
			}
			if r.GetFewer()+r.GetMore()+r.GetOperations() == 0 {
				return r, nil
			}
		}
		if clock.Sleep(ctx, clock.System(), w.Pause) != nil {
			return nil, &Refusal{
				Reason:   "the time for waiting is over: " + told,
				NextStep: "it goes on by itself: repeat the command to watch it, or look with skein placement show",
			}
		}
	}
}

// ReplicationProgress says in a line how far it is, for who waits.
func ReplicationProgress(r *adminpb.Replication) string {
	text := fmt.Sprintf("of %d ranges %d have fewer voters than %d, %d have more; %d operations are under way",
		r.GetRanges(), r.GetFewer(), r.GetFactor(), r.GetMore(), r.GetOperations())
	if r.GetSilent() > 0 {
		text += fmt.Sprintf("; %d ranges wait for a node that does not answer (skein node list)", r.GetSilent())
	}
	if r.GetPaused() {
		text += "; placement is paused (skein placement resume)"
	}
	if r.GetFewer() > 0 {
		text += declining(r)
	}
	return text
}

// maxDeclining bounds the nodes that a line names.
const maxDeclining = 4

// declining says behind a semicolon which nodes are given no replicas, "" where all are.
func declining(r *adminpb.Replication) string {
	var all []string
	for i, d := range r.GetDeclining() {
		if i == maxDeclining {
			all = append(all, fmt.Sprintf("%d more (skein placement show)", len(r.GetDeclining())-i))
			break
		}
		all = append(all, d.GetNode()+" ("+d.GetWhy()+")")
	}
	if len(all) == 0 {
		return ""
	}
	return "; no replicas get " + strings.Join(all, ", ")
}

// WriteSetReplication prints what a number of voters means, and on notes what a table has no
// place for.
func WriteSetReplication(w, notes io.Writer, f Format, r *adminpb.PlacementSetReplicationResponse) error {
	if f == JSON {
		return writeJSON(w, struct {
			Before  int64    `json:"before"`
			After   int64    `json:"after"`
			Ranges  int64    `json:"ranges"`
			Added   int64    `json:"replicas_added"`
			Bytes   int64    `json:"bytes_copied"`
			Removed int64    `json:"replicas_removed"`
			Notes   []string `json:"notes"`
		}{r.GetBefore(), r.GetAfter(), r.GetRanges(), r.GetAdded(), r.GetBytes(), r.GetRemoved(), list(r.GetNotes())})
	}
	for _, n := range r.GetNotes() {
		if _, err := fmt.Fprintln(notes, "note: "+n); err != nil {
			return err
		}
	}
	return writeTable(w, [][]string{
		{"REPLICATION", "BEFORE", "RANGES", "REPLICAS ADDED", "BYTES COPIED", "REPLICAS REMOVED"},
		slices.Concat(numbers(r.GetAfter(), r.GetBefore(), r.GetRanges(), r.GetAdded()), []string{SizeText(r.GetBytes())}, numbers(r.GetRemoved())),
	})
}

func numbers(ns ...int64) (row []string) {
	for _, n := range ns {
		row = append(row, strconv.FormatInt(n, 10))
	}
	return row
}

// replicationJSON is how many voters ranges are to have, and how far that is.
type replicationJSON struct {
	Factor     int64 `json:"factor"`
	Ranges     int64 `json:"ranges"`
	Fewer      int64 `json:"fewer"`
	More       int64 `json:"more"`
	Silent     int64 `json:"silent"`
	Operations int64 `json:"operations"`
	Paused     bool  `json:"paused,omitempty"`
	PausedAt   int64 `json:"paused_since_unix_ms,omitempty"`
	// Declining are the nodes that are given no replicas.
	Declining []decliningJSON `json:"declining,omitempty"`
}

type decliningJSON struct {
	Node string `json:"node"`
	Why  string `json:"why"`
}

func replicationToJSON(r *adminpb.Replication) *replicationJSON {
	if r == nil {
		return nil
	}
	out := &replicationJSON{r.GetFactor(), r.GetRanges(), r.GetFewer(), r.GetMore(), r.GetSilent(), r.GetOperations(), r.GetPaused(), r.GetPausedSinceUnixMs(), nil}
	for _, d := range r.GetDeclining() {
		out.Declining = append(out.Declining, decliningJSON{d.GetNode(), d.GetWhy()})
	}
	return out
}

// writeReplicationTable prints how far the ranges are, where somebody could say it.
func writeReplicationTable(w io.Writer, r *adminpb.Replication) error {
	if r == nil {
		return nil
	}
	decides := "placement"
	if r.GetPaused() {
		decides = "nobody: paused"
	}
	err := writeTable(w, [][]string{
		{"REPLICATION", "RANGES", "FEWER VOTERS", "MORE VOTERS", "A NODE SILENT", "OPERATIONS", "DECIDED BY"},
		append(numbers(r.GetFactor(), r.GetRanges(), r.GetFewer(), r.GetMore(), r.GetSilent(), r.GetOperations()), decides),
	})
	if err != nil || len(r.GetDeclining()) == 0 {
		return err
	}
	rows := [][]string{{"GETS NO REPLICAS", "WHY"}}
	for _, d := range r.GetDeclining() {
		rows = append(rows, []string{d.GetNode(), d.GetWhy()})
	}
	return writeTable(w, rows)
}
