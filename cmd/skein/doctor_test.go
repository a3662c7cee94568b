package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.uber.org/zap"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embed"
)

// troubles is what is found in a cluster that has all the troubles there are.
func troubles(t *testing.T) []adminapi.Finding {
	t.Helper()
	b, err := os.ReadFile("../../adminapi/testdata/troubles.json")
	if err != nil {
		t.Fatal(err)
	}
	s := &adminpb.SurveyResponse{}
	if err := protojson.Unmarshal(b, s); err != nil {
		t.Fatal(err)
	}
	return adminapi.Diagnose(s, []adminapi.EndpointError{{Endpoint: "h:1", Error: "refused"}})
}

// commandsIn returns the commands of skein in a sentence, each up to the mark or the word behind it.
func commandsIn(sentence string) (all []string, err error) {
	// Whoever or whatever is named in the place of NAME, ID or NUMBER.
	named := regexp.MustCompile(`^(n?\d+|b\d)$`)
	for _, text := range regexp.MustCompile(`\bskein (?:[^,;:()]|[,;:]\S)+`).FindAllString(strings.ReplaceAll(sentence, ". ", "; "), -1) {
		words := strings.Fields(text)
		c, rest, err := newRoot(nil).Find(words[1:])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", text, err)
		}
		if c.HasSubCommands() {
			return nil, fmt.Errorf("%s: %s needs a command", text, c.CommandPath())
		}
		path := strings.Fields(c.CommandPath())
		end := len(path)
		for i := range rest {
			// The word behind a flag may be its value.
			if strings.HasPrefix(rest[i], "-") || named.MatchString(rest[i]) || i > 0 && strings.HasPrefix(rest[i-1], "-") && understood(words[1:end], c.CommandPath()) != nil {
				end = len(path) + i + 1
				continue
			}
			break
		}
		if err := understood(words[1:end], c.CommandPath()); err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(words[:end], " "), err)
		}
		all = append(all, strings.Join(words[:end], " "))
	}
	return all, nil
}

// The commands that findings advise are understood as they stand. Those for certificates do what they are advised for, from the
// directory above that of the authority.
func TestNextStepsOfFindingsRun(t *testing.T) {
	for _, wrong := range []string{"skein node show says why", "see skein range", "skein cert create-node n2 --overwrit), and", "(skein placement set-replication)", "skein nod list"} {
		if all, err := commandsIn(wrong); err == nil {
			t.Errorf("%s: taken for %q", wrong, all)
		}
	}
	all := troubles(t)
	t.Chdir(t.TempDir())
	if code := execute(t.Context(), []string{"cert", "create-ca"}, nil, &bytes.Buffer{}, os.Stderr); code != 0 {
		t.Fatal(code)
	}
	count := map[string]int{}
	for _, f := range all {
		commands, err := commandsIn(f.Next)
		if err != nil {
			t.Errorf("%s: %v", f.What, err)
		}
		for _, command := range commands {
			args := strings.Fields(command)[1:]
			if count[args[0]]++; args[0] != "cert" || args[1] == "create-ca" {
				continue
			}
			for i := range 2 { // in the place of an old one too
				if i == 1 && !strings.HasSuffix(command, " --overwrite") {
					break
				}
				var stderr bytes.Buffer
				if code := execute(t.Context(), args, nil, &bytes.Buffer{}, &stderr); code != 0 {
					t.Errorf("%s: %s", command, stderr.String())
				}
			}
		}
	}
	for _, host := range []string{"n3.example.com", "10.0.0.3", "fd00::3"} {
		if code := execute(t.Context(), []string{"cert", "check", "--certs-dir", "n3", "--host", host}, nil, &bytes.Buffer{}, os.Stderr); code != 0 {
			t.Errorf("the certificate of n3 does not hold for %s", host)
		}
	}
	for _, file := range []string{"n1/node.crt", "n4/node.crt", "n7/node.key"} {
		if _, err := os.Stat(filepath.FromSlash(file)); err != nil {
			t.Error(err)
		}
	}
	if count["cert"] != 6 || count["node"] < 5 || count["range"] < 4 || count["placement"] < 2 || count["hold"] == 0 || count["debug"] == 0 {
		t.Errorf("found: %v", count)
	}
}

// A node that was removed ends with a status of its own, which the unit of systemd does not answer with another start.
func TestARemovedNodeIsNotStartedAgain(t *testing.T) {
	unit, err := os.ReadFile("../../deploy/systemd/skein.service")
	if err != nil {
		t.Fatal(err)
	}
	if line := fmt.Sprintf("\nRestart=on-failure\nRestartPreventExitStatus=%d\n", exitRemoved); !strings.Contains(string(unit), line) {
		t.Errorf("the unit has no %q", line)
	}
	for _, tc := range []struct {
		err  error
		want int
	}{
		{fmt.Errorf("start: %w: %w", embed.ErrRemoved, &adminapi.Refusal{Reason: "never again", NextStep: "join anew"}), exitRemoved},
		{errors.New("the disk"), exitRefused},
	} {
		replaceRun(t, func(context.Context, *config.Config, *zap.Logger) error { return tc.err })
		if code := execute(t.Context(), []string{"--data-dir", t.TempDir(), "--log-outputs", filepath.Join(t.TempDir(), "log")}, nil, &bytes.Buffer{}, &bytes.Buffer{}); code != tc.want {
			t.Errorf("%v: status %d", tc.err, code)
		}
	}
}
