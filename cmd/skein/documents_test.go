package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// texts are the constant strings of a program's source, with what is added to each other as one, and without
// formatting verbs for a percent sign.
type texts []string

// readTexts reads those of all packages of a node and of skein.
func readTexts(t *testing.T, root string) (all texts) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") || slices.Contains([]string{"bin", "bench", "conformance", "deploy", "sim", "testdata"}, d.Name())):
			return filepath.SkipDir
		case d.IsDir(), !strings.HasSuffix(path, ".go"), strings.HasSuffix(path, "_test.go"), strings.HasSuffix(path, ".pb.go"):
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			text, ok := constant(e)
			if ok && len(text) > 3 {
				all = append(all, strings.ReplaceAll(text, "%%", "%"))
			}
			return !ok
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// constant returns the text of a literal, or of literals that are added to each other.
func constant(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, e.Kind == token.STRING && err == nil
	case *ast.BinaryExpr:
		x, ok := constant(e.X)
		y, also := constant(e.Y)
		return x + y, e.Op == token.ADD && ok && also
	}
	return "", false
}

// has says whether the source has a text. A … in it is something that is filled in.
func (all texts) has(text string) (missing string) {
	for part := range strings.SplitSeq(text, "…") {
		if part = strings.TrimSpace(part); part != "" && !slices.ContainsFunc(all, func(s string) bool { return strings.Contains(s, part) }) {
			return part
		}
	}
	return ""
}

// page is a part of a document: its heading, the lines of its blocks, and its links.
type page struct {
	heading string
	blocks  [][]string
}

func pages(t *testing.T, path string) (all []page) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for part := range strings.SplitSeq(string(b), "\n## ") {
		heading, text, _ := strings.Cut(part, "\n")
		p := page{heading: heading}
		for i, block := range strings.Split(text, "```") {
			if i%2 == 1 {
				p.blocks = append(p.blocks, strings.Split(strings.Trim(block, "\n"), "\n"))
			}
		}
		all = append(all, p)
	}
	return all
}

// TestTroubleshootingDocument: what docs/TROUBLESHOOTING.md shows of logs, errors, findings and metrics is what this program
// says, and its commands are skein's.
func TestTroubleshootingDocument(t *testing.T) {
	source := readTexts(t, "../..")
	for _, doc := range []string{"ERRORS", "METRICS"} {
		b, err := os.ReadFile("../../docs/" + doc + ".md")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			source = append(source, line)
		}
	}
	if missing := source.has("no quorum for … and nobody ever says this"); missing == "" {
		t.Fatal("everything is found")
	}
	all := pages(t, "../../docs/TROUBLESHOOTING.md")
	if len(all) < 25 {
		t.Errorf("only %d parts", len(all))
	}
	seen := regexp.MustCompile(`^(log|client|doctor|command|metric): (.*)$`)
	for i, p := range all {
		if i > 0 && len(p.blocks) < 2 {
			t.Errorf("%s: %d blocks", p.heading, len(p.blocks))
			continue
		}
		if i > 0 {
			for _, line := range p.blocks[0] {
				m := seen.FindStringSubmatch(line)
				if m == nil {
					t.Errorf("%s: who says %q?", p.heading, line)
				} else if missing := source.has(m[2]); missing != "" {
					t.Errorf("%s: nothing says %q, of %q", p.heading, missing, line)
				}
			}
			p.blocks = p.blocks[1:]
		}
		for _, block := range p.blocks {
			for _, line := range block {
				isCommand(t, line)
			}
		}
	}
}

// isCommand checks a line of a document: that skein understands it, if it is one of skein's.
func isCommand(t *testing.T, line string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "n1.yaml")
	if err := os.WriteFile(file, []byte("name: n1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	words := shellWords(t, strings.NewReplacer("/etc/skein/n1.yaml", file).Replace(line))
	switch words[0] {
	case "skein":
		c, _, err := newRoot(nil).Find(withStart(words[1:]))
		if err == nil {
			err = understood(words[1:], c.CommandPath())
		}
		if err != nil || c.HasSubCommands() {
			t.Errorf("%s: %v", line, err)
		}
	case "etcdctl", "chown":
	default:
		t.Errorf("%s: not known here", line)
	}
}

// TestDocumentsCommands: the commands of all documents, in blocks and in sentences, are skein's. TestDocumentedCommandsRun runs
// those of the blocks, with -documents.
func TestDocumentsCommands(t *testing.T) {
	documents, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("../../*.md")
	if err != nil {
		t.Fatal(err)
	}
	program := regexp.MustCompile(`^(?:kubectl exec [a-z0-9-]+ -- |docker (?:compose -f [a-z/.]+ )?exec [a-z0-9-]+ )?(?:bin/|bin/release/)?(skein(?: .*)?)$`)
	continued := regexp.MustCompile(`\\\n *`)
	count := 0
	for _, doc := range append(documents, more...) {
		for _, p := range pages(t, doc) {
			for _, block := range p.blocks {
				text := continued.ReplaceAllString(strings.Join(block, "\n"), "")
				for line := range strings.Lines(text) {
					line, _, _ = strings.Cut(strings.TrimSpace(line), "  #")
					m := program.FindStringSubmatch(line)
					if m == nil || strings.Contains(line, "...") || strings.Contains(line, "$i") { // left out, or counted
						continue
					}
					count++
					t.Run(filepath.Base(doc), func(t *testing.T) {
						isCommand(t, strings.NewReplacer("$CLUSTER", "n1=http://127.0.0.1:12380", " SERIAL", " 1f", " FILE...", " audit.log").Replace(m[1]))
					})
				}
			}
		}
		for _, command := range mentioned(t, doc) {
			words := strings.Fields(command)
			c, rest, err := newRoot(nil).Find(withStart(words[1:]))
			if err != nil || c.HasSubCommands() && c.HasParent() && len(rest) > 0 {
				t.Errorf("%s mentions `%s`: %v", doc, command, err)
			}
		}
	}
	if count < 100 {
		t.Errorf("only %d commands", count)
	}
}

// TestDocumentsLink: each link between documents leads to a file, and to a heading in it.
func TestDocumentsLink(t *testing.T) {
	documents, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("../../*.md")
	if err != nil {
		t.Fatal(err)
	}
	link := regexp.MustCompile(`\]\(([^)\s]*)\)`)
	for _, doc := range append(documents, append(more, "../../deploy/helm/skein/README.md")...) {
		b, err := os.ReadFile(doc)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(string(b), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(m[1], "#")
			to := doc
			if path != "" {
				to = filepath.Join(filepath.Dir(doc), path)
			}
			text, err := os.ReadFile(to)
			if info, serr := os.Stat(to); serr == nil && info.IsDir() && anchor == "" {
				continue
			}
			if err != nil {
				t.Errorf("%s: %v", doc, err)
			} else if anchor != "" && !slices.Contains(anchors(string(text)), anchor) {
				t.Errorf("%s: %s has no heading %s", doc, to, anchor)
			}
		}
	}
}

// anchors are those that GitHub makes of a document's headings.
func anchors(text string) (all []string) {
	for line := range strings.Lines(text) {
		heading := strings.TrimLeft(line, "#")
		if heading == line || !strings.HasPrefix(heading, " ") {
			continue
		}
		heading = strings.ToLower(strings.TrimSpace(heading))
		heading = regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(heading, "")
		all = append(all, strings.ReplaceAll(heading, " ", "-"))
	}
	return all
}
