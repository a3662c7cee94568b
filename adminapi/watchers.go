package adminapi

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/skeindb/skein/api/adminpb"
)

// WatcherBackend is what the service asks of the node about watchers.
type WatcherBackend interface {
	// Watchers returns the watchers of a node, or of all with "", whose clients are furthest behind, at most so many. It names the nodes
	// that do not answer, and needs no quorum.
	Watchers(ctx context.Context, node string, most int) (*adminpb.WatcherListResponse, error)
}

// Bounds of a list of watchers.
const (
	defaultWatchers = 100
	mostWatchers    = 1000
	// watcherWindow is how far into the list one may look: each node sends as many.
	watcherWindow = 10_000
)

func (s *server) WatcherList(ctx context.Context, q *adminpb.WatcherListRequest) (*adminpb.WatcherListResponse, error) {
	const what = "list the watchers"
	limit, skip := int(cmp.Or(q.GetLimit(), defaultWatchers)), int(q.GetSkip())
	if limit > mostWatchers || skip+limit > watcherWindow {
		return nil, grpcError(what, &Refusal{
			Reason:   fmt.Sprintf("%d watchers behind the first %d are asked for", limit, skip),
			NextStep: fmt.Sprintf("ask for at most %d at a time, of the first %d; those furthest behind come first", mostWatchers, watcherWindow),
		}, readAgain)
	}
	r, err := s.backend.Watchers(ctx, q.GetNode(), skip+limit)
	if err != nil {
		return nil, grpcError(what, err, readAgain)
	}
	all := FurthestBehind(r.GetWatchers(), skip+limit)
	r.Watchers = all[min(skip, len(all)):]
	slices.SortFunc(r.Missing, func(a, b *adminpb.WatchersMissing) int { return cmp.Compare(a.GetNode(), b.GetNode()) })
	return r, nil
}

// FurthestBehind sorts watchers, those furthest behind first, and cuts the list to so many. It lets the others go.
func FurthestBehind(all []*adminpb.Watcher, most int) []*adminpb.Watcher {
	slices.SortFunc(all, func(a, b *adminpb.Watcher) int {
		return cmp.Or(cmp.Compare(b.GetBehind(), a.GetBehind()), cmp.Compare(b.GetQueuedEvents(), a.GetQueuedEvents()), cmp.Compare(b.GetAgeMs(), a.GetAgeMs()),
			cmp.Compare(a.GetNode(), b.GetNode()), cmp.Compare(a.GetClient(), b.GetClient()), cmp.Compare(a.GetId(), b.GetId()))
	})
	most = min(most, len(all))
	return slices.Delete(all, most, len(all))
}

// Watchers lists the watchers of a node, or of all, those furthest behind first.
func (c *Client) Watchers(ctx context.Context, q *adminpb.WatcherListRequest) (*adminpb.WatcherListResponse, error) {
	return call(ctx, c, q, adminpb.AdminClient.WatcherList)
}

// watcherJSON is a watcher as -w json prints it; the order of the fields is part of the output.
type watcherJSON struct {
	Node           string   `json:"node"`
	Client         string   `json:"client"`
	User           string   `json:"user,omitempty"`
	ID             int64    `json:"watch_id"`
	Key            []byte   `json:"key_base64"`
	RangeEnd       []byte   `json:"range_end_base64,omitempty"`
	Cut            bool     `json:"keys_are_cut,omitempty"`
	Start          int64    `json:"start_revision,omitempty"`
	Filters        []string `json:"filters,omitempty"`
	PrevKV         bool     `json:"prev_kv,omitempty"`
	ProgressNotify bool     `json:"progress_notify,omitempty"`
	Behind         uint64   `json:"behind_revisions"`
	QueuedEvents   uint64   `json:"queued_events"`
	QueuedBytes    uint64   `json:"queued_bytes"`
	History        bool     `json:"reads_history,omitempty"`
	AgeMs          int64    `json:"age_ms"`
}

func filtersOf(w *adminpb.Watcher) (all []string) {
	if w.GetNoPut() {
		all = append(all, "noput")
	}
	if w.GetNoDelete() {
		all = append(all, "nodelete")
	}
	return all
}

// WriteWatchers prints watchers, and on notes what a table has no place for. skip is how many of the list were left out before them.
func WriteWatchers(w, notes io.Writer, f Format, k KeyFormat, r *adminpb.WatcherListResponse, skip int) error {
	if f == JSON {
		return writeWatchersJSON(w, r)
	}
	for _, m := range r.GetMissing() {
		fmt.Fprintf(notes, "%s does not answer: %s\n", m.GetNode(), m.GetReason())
	}
	if len(r.GetWatchers()) == 0 {
		_, err := fmt.Fprintln(w, "no watchers")
		return err
	}
	rows := [][]string{{"NODE", "CLIENT", "USER", "KEY", "END", "FROM", "FILTERS", "BEHIND", "QUEUED", "EVENTS FROM", "AGE"}}
	for _, o := range r.GetWatchers() {
		from, events := "", "memory"
		if o.GetStartRevision() != 0 {
			from = strconv.FormatInt(o.GetStartRevision(), 10)
		}
		if o.GetHistory() {
			events = "history"
		}
		rows = append(rows, []string{
			o.GetNode(), o.GetClient(), o.GetUser(), k.Text(o.GetKey()) + cutText(o), watcherEnd(k, o), from, strings.Join(filtersOf(o), " "),
			strconv.FormatUint(o.GetBehind(), 10), strconv.FormatUint(o.GetQueuedEvents(), 10), events, ageText(o.GetAgeMs()),
		})
	}
	if err := writeTable(w, rows); err != nil {
		return err
	}
	last := skip + len(r.GetWatchers())
	_, err := fmt.Fprintf(notes, "%d to %d of %d watchers\n", skip+1, last, max(r.GetTotal(), uint64(last)))
	return err
}

func writeWatchersJSON(w io.Writer, r *adminpb.WatcherListResponse) error {
	out := struct {
		Watchers []watcherJSON     `json:"watchers"`
		Total    uint64            `json:"total"`
		Missing  []slowMissingJSON `json:"missing,omitempty"`
	}{Watchers: []watcherJSON{}, Total: r.GetTotal()}
	for _, o := range r.GetWatchers() {
		out.Watchers = append(out.Watchers, watcherJSON{
			o.GetNode(), o.GetClient(), o.GetUser(), o.GetId(), o.GetKey(), o.GetRangeEnd(), o.GetCut(), o.GetStartRevision(), filtersOf(o), o.GetPrevKv(),
			o.GetProgressNotify(), o.GetBehind(), o.GetQueuedEvents(), o.GetQueuedBytes(), o.GetHistory(), o.GetAgeMs(),
		})
	}
	for _, m := range r.GetMissing() {
		out.Missing = append(out.Missing, slowMissingJSON{m.GetNode(), m.GetReason()})
	}
	return writeJSON(w, out)
}

// cutText goes behind a key of which there may be more.
func cutText(w *adminpb.Watcher) string {
	if w.GetCut() {
		return "…"
	}
	return ""
}

// watcherEnd is the first key that is not watched any more, in words where that is no key.
func watcherEnd(k KeyFormat, w *adminpb.Watcher) string {
	switch end := string(w.GetRangeEnd()); end {
	case "":
		return "(one key)"
	case "\x00":
		return "(none)"
	default:
		return k.Text([]byte(end)) + cutText(w)
	}
}

// ageText is an age for people.
func ageText(ms int64) string {
	d := time.Duration(ms) * time.Millisecond
	if d < time.Minute {
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}
