package kverror

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/status"
)

// TestExplanations: each kind is explained, in sentences, and is found by its name and by its own text.
func TestExplanations(t *testing.T) {
	for _, r := range Table() {
		e := r.Kind.Explanation()
		if !strings.HasSuffix(e.Means, ".") || e.Next == "" {
			t.Errorf("%s: %+v", r.Name, e)
		}
		if r.Fate == NotApplied && strings.Contains(e.Means, "may have happened") {
			t.Errorf("%s: it was certainly not applied, and that is not what it says", r.Name)
		}
		if k, ok := Named(strings.ReplaceAll(strings.ToUpper(r.Name), " ", "-")); !ok || k != r.Kind {
			t.Errorf("%s is named %v, %v", r.Name, k, ok)
		}
		if got := InText("put: " + (&Error{Kind: r.Kind, Detail: "of range 7"}).Error()); !slices.Contains(got, r.Kind) {
			t.Errorf("%s is not found in its own text: %v", r.Name, got)
		}
		if got := InText("Error: " + r.GRPC.Error()); !slices.Contains(got, r.Kind) && !slices.Equal(got, []Kind{Timeout}) {
			t.Errorf("%s is not found in the client's text: %v", r.Name, got)
		}
	}
	if (numKinds + 1).Explanation() != Internal.Explanation() {
		t.Error("the kind of a newer node is not internal")
	}
	if _, ok := Named("nonsense"); ok {
		t.Error("nonsense is a kind")
	}
}

// TestInText: the longest text that is in a line counts, and only whole words do.
func TestInText(t *testing.T) {
	for _, c := range []struct {
		text string
		want []Kind
	}{
		{`{"level":"warn","error":"rpc error: code = Unavailable desc = etcdserver: request timed out, possibly due to connection lost"}`, []Kind{TimeoutConnectionLost}},
		{"Error: etcdserver: request timed out", []Kind{Timeout}},
		{"etcdserver: mvcc: required revision has been compacted", []Kind{Compacted}},
		{"mvcc: required revision has been compacted", []Kind{Compacted}},
		{"Error: context deadline exceeded", []Kind{DeadlineExceeded}},
		{"skein: list the nodes: no leader", []Kind{NoLeader, AccessChanged}},
		{"skein: this cluster is being loaded: by a restore", []Kind{Loading}},
		{"shard: split range 6: leader changed: the leadership ended", []Kind{LeaderChanged}},
		{"unstopped", nil},
		{"", nil},
	} {
		if got := InText(c.text); !slices.Equal(got, c.want) {
			t.Errorf("%q: %v, want %v", c.text, got, c.want)
		}
	}
}

// docs renders the table as Markdown: the text of docs/ERRORS.md.
func docs() string {
	var b strings.Builder
	b.WriteString(`# Errors

Rendered from the table in package kverror (SKEIN_REWRITE=1 go test ./kverror -run TestDocs). ` + "`skein explain`" + ` says the same
for a name, or for a line that is pasted from a client or a log.

Clients get etcd's own errors, so that they react as they do to etcd. For each error stand here its text and gRPC code, whether the
request may have been applied, and who repeats it.
`)
	for _, r := range Table() {
		e, s := r.Kind.Explanation(), status.Convert(r.GRPC)
		fate := map[Fate]string{NotApplied: "Not applied", Unknown: "May have been applied"}[r.Fate]
		retry := map[Retry]string{
			RetryNever: "nobody repeats it by itself", RetryRouter: "the node that the client is connected to repeats it until the deadline", RetryClient: "the client may repeat it after a pause",
		}[r.Retry]
		fmt.Fprintf(&b, "\n## %s\n\n`%s` (%s). %s; %s.\n\n%s\n\nNext: %s\n", r.Name, s.Message(), s.Code(), fate, retry, e.Means, e.Next)
	}
	return b.String()
}

// TestDocs: docs/ERRORS.md is what the table says.
func TestDocs(t *testing.T) {
	const path = "../docs/ERRORS.md"
	if os.Getenv("SKEIN_REWRITE") != "" {
		if err := os.WriteFile(path, []byte(docs()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(b) != docs() {
		t.Error("docs/ERRORS.md is not what the table says: run SKEIN_REWRITE=1 go test ./kverror -run TestDocs")
	}
}
