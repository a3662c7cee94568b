package certs_test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/certs"
)

// story is a directory under a clock that stands still.
type story struct {
	t       *testing.T
	root    string
	now     time.Time
	serials []string // in the order of their first mention
}

// TestStories walks testdata/certs. Directories lie below one root; #1 is the first serial number
// that is mentioned.
func TestStories(t *testing.T) {
	s := &story{t: t, root: t.TempDir(), now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	datadriven.RunTest(t, "testdata/certs", func(_ *testing.T, d *datadriven.TestData) string {
		out, err := s.run(d)
		if err != nil {
			out += err.Error() + "\n"
		}
		return s.masked(out)
	})
}

// masked replaces what differs from run to run.
func (s *story) masked(out string) string {
	out = strings.ReplaceAll(out, s.root+"/", "")
	return regexp.MustCompile(`\b[0-9a-f]{32}\b`).ReplaceAllStringFunc(out, func(text string) string {
		if !slices.Contains(s.serials, text) {
			s.serials = append(s.serials, text)
		}
		return fmt.Sprintf("#%d", slices.Index(s.serials, text)+1)
	})
}

func (s *story) run(d *datadriven.TestData) (string, error) {
	dir, name, days, out := "ca", "n1", 0, ""
	var hosts []string
	overwrite := d.HasArg("overwrite")
	d.MaybeScanArgs(s.t, "dir", &dir)
	d.MaybeScanArgs(s.t, "name", &name)
	d.MaybeScanArgs(s.t, "days", &days)
	for i := range d.CmdArgs {
		if a := &d.CmdArgs[i]; a.Key == "host" {
			hosts = append(hosts, a.Vals...)
		}
	}
	if d.MaybeScanArgs(s.t, "out", &out); out != "" {
		out = filepath.Join(s.root, out)
	}
	at := certs.At(filepath.Join(s.root, dir), func() time.Time { return s.now })
	if !d.HasArg("days") {
		days = certs.LeafDays
		if d.Cmd == "create-ca" {
			days = certs.CADays
		}
	}
	o := certs.Issue{Days: days, Out: out, Overwrite: overwrite}
	told := func(i certs.Info, err error) (string, error) {
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("%s: %s %q %v until %s, %s, %s\n", i.File, i.Kind, i.Name, i.Hosts, i.Until.Format(time.DateOnly), i.State, i.Serial), nil
	}
	switch d.Cmd {
	case "pass":
		s.now = s.now.AddDate(0, 0, days)
		return s.now.Format(time.DateOnly) + "\n", nil
	case "create-ca":
		return told(at.CreateCA(days, overwrite))
	case "create-node":
		return told(at.CreateNode(name, hosts, o))
	case "create-client":
		return told(at.CreateClient(name, o))
	case "list":
		all, err := at.List()
		var b strings.Builder
		if err == nil {
			err = certs.WriteList(&b, all)
		}
		return s.table(b.String()), err
	case "revoke":
		what := strings.TrimSpace(d.Input)
		if n := 0; strings.HasPrefix(what, "#") {
			if _, err := fmt.Sscanf(what, "#%d", &n); err != nil {
				return "", err
			}
			what = s.serials[n-1]
		} else if strings.Contains(what, "/") {
			what = filepath.Join(s.root, what)
		}
		i, before, err := at.Revoke(what)
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("%s %q %s %s, before %t\n", i.Kind, i.Name, i.Serial, i.State, before), nil
	case "check":
		r := at.Check(hosts)
		text := fmt.Sprintf("node %q\n", r.Node)
		for _, err := range r.Notes {
			text += fmt.Sprintf("soon: %v\n", err)
		}
		for _, err := range r.Problems {
			text += fmt.Sprintf("wrong: %v\n", err)
		}
		return text, nil
	case "files":
		return s.files(filepath.Join(s.root, dir))
	case "shell":
		return "", s.shell(d.Input)
	}
	s.t.Fatalf("%s: no command %s", d.Pos, d.Cmd)
	return "", nil
}

// table makes the columns of a list independent of the serial numbers' length.
func (s *story) table(text string) string {
	return regexp.MustCompile(`(?m)  +`).ReplaceAllString(text, " | ")
}

// files lists the files below a directory with their modes.
func (s *story) files(dir string) (string, error) {
	var lines []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		lines = append(lines, s.masked(fmt.Sprintf("%s %s\n", info.Mode(), path)))
		return err
	})
	slices.SortFunc(lines, func(a, b string) int { return strings.Compare(a[10:], b[10:]) })
	return strings.Join(lines, ""), err
}

// shell does to files what people do.
func (s *story) shell(lines string) error {
	for line := range strings.Lines(lines) {
		w := strings.Fields(line)
		for i := range w[1:] {
			if strings.Contains(w[i+1], "/") {
				w[i+1] = filepath.Join(s.root, w[i+1])
			}
		}
		var err error
		switch w[0] {
		case "rm":
			err = os.Remove(w[1])
		case "mkdir":
			err = os.Mkdir(w[1], 0o700)
		case "open":
			err = os.Chmod(w[1], 0o644)
		case "widen":
			err = os.Chmod(w[1], 0o777)
		case "narrow":
			err = os.Chmod(w[1], 0o700)
		case "cp":
			var content []byte
			if content, err = os.ReadFile(w[1]); err == nil {
				err = os.WriteFile(w[2], content, 0o600)
			}
		default:
			err = fmt.Errorf("no command %q", line)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// TestNoUser: a client that is no user has no common name, and is listed by its name.
func TestNoUser(t *testing.T) {
	root := t.TempDir()
	d := certs.At(root, time.Now)
	if _, err := d.CreateCA(10, false); err != nil {
		t.Fatal(err)
	}
	made, err := d.CreateClient("proxy", certs.Issue{Days: 5, NoUser: true})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(root, "client.proxy.crt"), filepath.Join(root, "client.proxy.key"))
	if err != nil {
		t.Fatal(err)
	}
	all, err := d.List()
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	if cn := pair.Leaf.Subject.CommonName; cn != "" || made.Name != "proxy" || all[1].Name != "proxy" || all[1].Kind != "client" {
		t.Errorf("common name %q, made %+v, listed %+v", cn, made, all[1])
	}
}

// TestUse: TLS takes the certificates for what they are for, and for nothing else.
func TestUse(t *testing.T) {
	root := t.TempDir()
	d := certs.At(root, time.Now)
	if _, err := d.CreateCA(10, false); err != nil {
		t.Fatal(err)
	}
	if _, err := d.CreateNode("n 1%", []string{"localhost", "127.0.0.1"}, certs.Issue{Days: 5}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.CreateClient("root", certs.Issue{Days: 5}); err != nil {
		t.Fatal(err)
	}
	pemCA, err := os.ReadFile(filepath.Join(root, certs.CAFile))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pemCA) {
		t.Fatal("no authority")
	}
	load := func(name string) *x509.Certificate {
		t.Helper()
		pair, err := tls.LoadX509KeyPair(filepath.Join(root, name+".crt"), filepath.Join(root, name+".key"))
		if err != nil {
			t.Fatal(err)
		}
		return pair.Leaf
	}
	for _, c := range []struct {
		name, host string
		use        x509.ExtKeyUsage
		ok         bool
	}{
		{"node", "localhost", x509.ExtKeyUsageServerAuth, true},
		{"node", "127.0.0.1", x509.ExtKeyUsageServerAuth, true},
		{"node", "example.com", x509.ExtKeyUsageServerAuth, false},
		{"node", "", x509.ExtKeyUsageClientAuth, true},
		{"client.root", "", x509.ExtKeyUsageClientAuth, true},
		{"client.root", "", x509.ExtKeyUsageServerAuth, false},
	} {
		_, err := load(c.name).Verify(x509.VerifyOptions{Roots: pool, DNSName: c.host, KeyUsages: []x509.ExtKeyUsage{c.use}})
		if (err == nil) != c.ok {
			t.Errorf("%+v: %v", c, err)
		}
	}
	node, client := load("node"), load("client.root")
	if node.Subject.CommonName != "" || len(node.URIs) != 1 {
		t.Errorf("a node's certificate with common name %q and %v", node.Subject.CommonName, node.URIs)
	}
	if name, ok, err := certs.NodeName(node.URIs[0]); name != "n 1%" || !ok || err != nil {
		t.Errorf("role %s: %q, %t, %v", node.URIs[0], name, ok, err)
	}
	if client.Subject.CommonName != "root" || len(client.URIs) != 0 {
		t.Errorf("a client's certificate with common name %q and %v", client.Subject.CommonName, client.URIs)
	}
	if node.NotBefore.After(time.Now().Add(-30 * time.Minute)) {
		t.Errorf("valid from %v: a node whose clock is behind refuses it", node.NotBefore)
	}
}

// TestRoles: each name has one URI, and each URI one name or none.
func TestRoles(t *testing.T) {
	for _, name := range []string{"n1", "a/b", "..", "ü", "a b%2F", "node", "\x00"} {
		u, err := url.Parse(certs.NodeURI(name).String())
		if err != nil {
			t.Fatal(err)
		}
		if got, ok, err := certs.NodeName(u); got != name || !ok || err != nil {
			t.Errorf("%q: %s, %q, %t, %v", name, u, got, ok, err)
		}
	}
	for text, bad := range map[string]bool{
		"skein://abc/1": false, "https://node/n1": false, "skein:node/n1": false, "skein://node:1/n1": false,
		"skein://node": true, "skein://node/": true, "skein://node/n1?x": true, "skein://u@node/n1": true, "skein://node/%6e1": true,
		"skein://node/a/b": true, "skein://node/n1#x": true,
	} {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if name, ok, err := certs.NodeName(u); ok || (err != nil) != bad {
			t.Errorf("%s: %q, %t, %v", text, name, ok, err)
		}
	}
}

// TestRevocationsAtOnce: none is lost.
func TestRevocationsAtOnce(t *testing.T) {
	root := t.TempDir()
	d := certs.At(root, time.Now)
	if _, err := d.CreateCA(10, false); err != nil {
		t.Fatal(err)
	}
	var serials []string
	for i := range 8 {
		c, err := d.CreateClient(fmt.Sprint("c", i), certs.Issue{Days: 5})
		if err != nil {
			t.Fatal(err)
		}
		serials = append(serials, c.Serial)
	}
	var wg sync.WaitGroup
	for _, s := range serials {
		wg.Go(func() {
			if _, before, err := d.Revoke(s); err != nil || before {
				t.Errorf("%s: before %t, %v", s, before, err)
			}
		})
	}
	wg.Wait()
	b, err := os.ReadFile(filepath.Join(root, certs.CRLFile))
	if err != nil {
		t.Fatal(err)
	}
	list, err := x509.ParseRevocationList(b) // as etcd reads it
	if err != nil || len(list.RevokedCertificateEntries) != len(serials) || list.Number.Int64() != int64(1+len(serials)) {
		t.Errorf("%d of %d are revoked, number %v, %v", len(list.RevokedCertificateEntries), len(serials), list.Number, err)
	}
}

// TestFailedWrite: what cannot be written leaves nothing behind, and what was there stays.
func TestFailedWrite(t *testing.T) {
	root := t.TempDir()
	d := certs.At(root, time.Now)
	if _, err := d.CreateCA(10, false); err != nil {
		t.Fatal(err)
	}
	// No file can be renamed to a directory.
	out := filepath.Join(t.TempDir(), "n1")
	if err := os.MkdirAll(filepath.Join(out, certs.NodeFile, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := d.CreateNode("n1", []string{"h"}, certs.Issue{Days: 5, Out: out, Overwrite: true}); err == nil {
		t.Fatal("a certificate was written over a directory")
	}
	left, err := filepath.Glob(filepath.Join(out, ".new-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
