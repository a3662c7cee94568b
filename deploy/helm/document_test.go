package helm

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// blocks are those of docs/KUBERNETES.md.
func blocks(t *testing.T) (all []string) {
	t.Helper()
	return blocksOf(t, "../../docs/KUBERNETES.md")
}

func blocksOf(t *testing.T, path string) (all []string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, block := range strings.Split(string(b), "\n```") {
		if i%2 == 1 {
			all = append(all, strings.ReplaceAll(block, "\\\n", ""))
		}
	}
	return all
}

// Each helm command of the documents makes what the API takes: its flags are those of helm, and its values the chart's.
func TestDocumentedCommands(t *testing.T) {
	commands := 0
	for _, path := range []string{"../../docs/KUBERNETES.md", "../../README.md", "skein/README.md"} {
		var lines []string
		for _, block := range blocksOf(t, path) {
			lines = append(lines, strings.Split(block, "\n")...)
		}
		for _, line := range lines {
			words := strings.Fields(line)
			if len(words) < 4 || words[0] != "helm" {
				continue
			}
			commands++
			if words[3] != "deploy/helm/skein" || words[1] != "install" && words[1] != "upgrade" {
				t.Errorf("%s: %s", path, line)
				continue
			}
			script := "exec " + program("helm") + " template " + words[2] + " skein --namespace default"
			for _, w := range words[4:] {
				if w != "--reset-then-reuse-values" { // a template has nothing to reuse
					script += " " + w
				}
			}
			out, err := exec.CommandContext(t.Context(), "sh", "-c", script).Output()
			if err != nil {
				t.Errorf("%s: %s: %v", path, line, err)
				continue
			}
			decode(t, string(out))
		}
	}
	if commands < 6 {
		t.Errorf("only %d commands are found", commands)
	}
}

// The objects that the document has Kubernetes make are what the API takes.
func TestDocumentedObjects(t *testing.T) {
	made := 0
	for _, block := range blocks(t) {
		if block = strings.TrimPrefix(block, "\n"); strings.HasPrefix(block, "apiVersion:") {
			made += len(decode(t, block))
		}
	}
	if made != 3 {
		t.Errorf("%d objects", made)
	}
}

// What helm says after an installation has the commands of this release.
func TestNotes(t *testing.T) {
	out := output(t, program("helm"), "install", "skein", "skein", "--namespace", "data", "--dry-run=client", "--set", "replicas=4")
	_, notes, _ := strings.Cut(out, "NOTES:")
	for _, want := range []string{"TLS IS OFF", "skein node decommission skein-3", "--set replicas=3", "kubectl delete pvc -n data data-skein-3", "http://skein.data.svc.cluster.local:2379"} {
		if !strings.Contains(notes, want) {
			t.Errorf("the notes lack %q:\n%s", want, notes)
		}
	}
}
