package console

import (
	"bytes"
	"cmp"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/skeindb/skein/api/adminpb"
)

// rangesQuery asks for a page of ranges.
type rangesQuery struct {
	// Skip of those that match are passed over, and Limit bounds the rest: 0 is a page.
	Skip, Limit int
	// Sort is key, load, keys or bytes: ascending by key, the others from the largest on.
	Sort string
	// Node, if not empty, has a replica, or with Leads the leader. Trouble are those without a leader, a quorum, or all
	// their replicas. Text is an id, or a part of the start.
	Node    string
	Leads   bool
	Trouble bool
	Text    string
}

// serveRanges answers with a page of ranges.
func (a *api) serveRanges(r *http.Request, body []byte) (any, error) {
	var q rangesQuery
	if err := read(body, &q); err != nil {
		return nil, err
	}
	if err := a.o.Services.Root(r.Context()); err != nil {
		return nil, err // before it has a part in what others have asked for
	}
	all, err := a.ranges.get(r.Context(), lookTime)
	if err != nil {
		return nil, err
	}
	page, total := q.page(all.GetRanges())
	return struct {
		List  json.RawMessage `json:"list"`
		Total int             `json:"total"`
		All   int             `json:"all"`
	}{messageJSON(&adminpb.RangeListResponse{Ranges: page, Stale: all.GetStale(), Missing: all.GetMissing()}), total, len(all.GetRanges())}, nil
}

// page returns the page that is asked for, and how many ranges match. The ranges themselves are shared, and stay as they are.
func (q *rangesQuery) page(all []*adminpb.Range) (page []*adminpb.Range, total int) {
	var match []*adminpb.Range
	for _, r := range all {
		if q.matches(r) {
			match = append(match, r)
		}
	}
	if by := map[string]func(*adminpb.Range) float64{
		"load":  func(r *adminpb.Range) float64 { return r.GetWritesPerSecond() + r.GetReadsPerSecond() },
		"keys":  func(r *adminpb.Range) float64 { return float64(r.GetKeys()) },
		"bytes": func(r *adminpb.Range) float64 { return float64(r.GetBytes()) },
	}[q.Sort]; by != nil {
		slices.SortStableFunc(match, func(x, y *adminpb.Range) int { return cmp.Compare(by(y), by(x)) })
	}
	limit := q.Limit
	if limit <= 0 || limit > pageSize {
		limit = pageSize
	}
	from := min(max(q.Skip, 0), len(match))
	return match[from:min(from+limit, len(match))], len(match)
}

func (q *rangesQuery) matches(r *adminpb.Range) bool {
	switch {
	case q.Node != "" && q.Leads && r.GetLeader() != q.Node,
		q.Node != "" && !slices.Contains(r.GetReplicas(), q.Node),
		q.Trouble && !inTrouble(r):
		return false
	case q.Text == "":
		return true
	}
	return strconv.FormatUint(r.GetId(), 10) == q.Text || strings.Contains(string(bytes.ToLower(r.GetStart())), strings.ToLower(q.Text))
}

// inTrouble says whether somebody should look at the range.
func inTrouble(r *adminpb.Range) bool {
	if r.GetLeader() == "" || r.GetState() == "no quorum" || r.GetState() == "unreachable" {
		return true
	}
	return slices.ContainsFunc(r.GetMembers(), func(m *adminpb.Replica) bool { return m.GetQuarantine() != "" })
}
