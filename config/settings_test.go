package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/journal"

	"github.com/skeindb/skein/internal/limits"
)

func setting(t *testing.T, name string, args []string, env ...string) Setting {
	t.Helper()
	all, _, _, err := Settings(args, env)
	if err != nil {
		t.Fatalf("%v %v: %v", args, env, err)
	}
	i := slices.IndexFunc(all, func(s Setting) bool { return s.Name == name })
	if i < 0 {
		t.Fatalf("there is no setting %s", name)
	}
	return all[i]
}

// TestSettings: each honoured flag is shown with its value, whether it comes from a flag, the environment or by default.
func TestSettings(t *testing.T) {
	cases := honouredCases(t)
	for _, f := range Flags() {
		c, ok := cases[f.Name]
		if f.Support != Honoured || !ok || f.Name == "config-file" || f.Name == "version" {
			continue
		}
		args := []string{}
		for i := 0; i < len(c.with); i += 2 {
			args = append(args, "--"+c.with[i]+"="+c.with[i+1])
		}
		v, err := f.kind.parse(c.value)
		if err != nil {
			t.Fatal(err)
		}
		got := setting(t, f.Name, append(args, "--"+f.Name+"="+c.value))
		if want := (Setting{f.Name, v.text, FromFlag, "--" + f.Name}); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
		variable := "ETCD_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		got = setting(t, f.Name, args, variable+"="+c.value)
		if want := (Setting{f.Name, v.text, FromEnvironment, variable}); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
		got = setting(t, f.Name, nil)
		if got.Origin != FromDefault || got.Source != "" || f.Default != "" && got.Value != f.Default {
			t.Errorf("by default %+v, want %q", got, f.Default)
		}
	}
}

// TestEffectiveSettings: what completes or implies a setting is shown.
func TestEffectiveSettings(t *testing.T) {
	for _, c := range []struct {
		args []string
		want Setting
	}{
		{nil, Setting{"data-dir", "default.skein", FromDefault, ""}},
		{[]string{"--name=n1"}, Setting{"data-dir", "n1.skein", FromDefault, ""}},
		{[]string{"--data-dir=d"}, Setting{"wal-dir", filepath.Join("d", "wal"), FromDefault, ""}},
		{[]string{"--name=n1"}, Setting{"initial-cluster", "n1=http://localhost:2380", FromDefault, ""}},
		{[]string{"--join=h:1"}, Setting{"initial-cluster", "", FromDefault, ""}},
		{[]string{"--auth-token-ttl=0"}, Setting{"auth-token-ttl", "300", FromFlag, "--auth-token-ttl"}},
		{[]string{"--certs-dir=c"}, Setting{"peer-key-file", filepath.Join("c", "node.key"), Implied, "certs-dir"}},
		{[]string{"--certs-dir=c"}, Setting{"client-cert-auth", "true", Implied, "certs-dir"}},
		{[]string{"--certs-dir=c"}, Setting{"listen-peer-urls", "https://localhost:2380", FromDefault, ""}},
	} {
		if got := setting(t, c.want.Name, c.args); got != c.want {
			t.Errorf("%v: %+v, want %+v", c.args, got, c.want)
		}
	}
	path := filepath.Join(t.TempDir(), "n1.yaml")
	if err := os.WriteFile(path, []byte("name: n1\nclient-transport-security: {auto-tls: true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	all, file, _, err := Settings([]string{"--config-file=" + path, "--name=n2"}, nil)
	if err != nil || file != path {
		t.Fatalf("%s, %v", file, err)
	}
	for _, want := range []Setting{{"name", "n1", FromFile, "name"}, {"auto-tls", "true", FromFile, "client-transport-security.auto-tls"}} {
		if !slices.Contains(all, want) {
			t.Errorf("there is no %+v", want)
		}
	}
}

// TestCheck: what a start would find later is found.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "secret")
	if err := os.WriteFile(file, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	noJournal := ""
	if !journal.Enabled() {
		noJournal = "there is no journal on this machine"
	}
	for _, c := range []struct {
		args string
		want string // "" if nothing is refused
	}{
		{"--name=n1", ""},
		{"--name=n1 --join=h:1", ""},
		{"--name=n1 --nam=n2", "did you mean --name?"},
		{"--name=n1 --initial-cluster=n2=http://h:1", "couldn't find local name"},
		{"--listen-client-urls=https://127.0.0.1:0 --advertise-client-urls=https://127.0.0.1:0 --cert-file=/none.crt --key-file=/none.key", "client TLS:"},
		{"--certs-dir=/none --name=n1 --initial-cluster=n2=https://h:1", "peer TLS:"},
		{"--certs-dir=/none --name=n1 --initial-cluster=n2=https://h:1", "couldn't find local name"},
		{"--certs-dir=/none --listen-console-urls=http://127.0.0.1:5", "the URL http://127.0.0.1:5 is without TLS, and --certs-dir asks for it: write https://127.0.0.1:5"},
		{"--auth-token=jwt,sign-method=RS256,priv-key=/none.key", "--auth-token: auth: invalid auth options: open /none.key"},
		{"--auth-token=jwt,sign-method=ES256,priv-key=" + file, "--auth-token:"},
		{"--auth-token=jwt,sign-method=HS256,priv-key=" + file, ""},
		{"--data-dir=" + file + "/d", "--data-dir " + file + "/d: stat " + file + "/d: not a directory"},
		{"--data-dir=" + file, "--data-dir " + file + ": " + file + " is no directory"},
		{"--data-dir=" + dir + "/a/b --wal-dir=" + dir + "/c/d", ""},
		{"--data-dir=" + dir + "/a/b --wal-dir=" + file, "--wal-dir " + file},
		{"--audit-log=" + dir, "--audit-log " + dir + ": it is a directory"},
		{"--audit-log=" + dir + "/none/audit.log", "--audit-log " + dir + "/none/audit.log: it cannot be made in " + dir + "/none: no such file"},
		{"--audit-log=" + dir + "/audit.log", ""},
		{"--log-outputs=stderr," + file, ""},
		{"--log-outputs=file://" + dir + "/log", ""},
		{"--log-outputs=file://" + dir + "/none/log", "--log-outputs " + dir + "/none/log: it cannot be made"},
		{"--log-outputs=udp://h:1", "--log-outputs udp://h:1: give default"},
		{"--log-outputs=log?x=1", "--log-outputs log?x=1: give default"},
		{"--log-outputs=systemd/journal", noJournal},
		{"--enable-log-rotation --log-outputs=" + dir + "/none/log", ""},
		{"--enable-log-rotation --log-outputs=file://" + dir + "/none/log", ""},
		{"--enable-log-rotation --log-outputs=" + file + "/log", "--log-outputs " + file + "/log: stat"},
		{"--enable-log-rotation --log-outputs=udp://h:1", "--log-outputs udp://h:1: give default"},
	} {
		_, _, err := Check(strings.Fields(c.args), nil, func() time.Time { return time.Unix(1, 0) })
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.args, err, c.want)
		}
	}
}

// TestCheckOfRights: what this user may not write is refused, what others may read is told, and nothing is changed.
func TestCheckOfRights(t *testing.T) {
	dir := t.TempDir()
	key, shut := filepath.Join(dir, "key"), filepath.Join(dir, "shut")
	if err := errors.Join(os.WriteFile(key, []byte("secret"), 0o644), os.Mkdir(shut, 0o500)); err != nil {
		t.Fatal(err)
	}
	check := func(args ...string) ([]Notice, error) {
		_, notices, err := Check(append(args, "--name=n1", "--data-dir="+filepath.Join(dir, "d")), nil, func() time.Time { return time.Unix(1, 0) })
		return notices, err
	}
	for _, mode := range []os.FileMode{0o644, 0o600} {
		if err := os.Chmod(key, mode); err != nil {
			t.Fatal(err)
		}
		notices, err := check("--auth-token=jwt,sign-method=HS256,priv-key=" + key)
		told := slices.ContainsFunc(notices, func(n Notice) bool { return n.Message == "a key is open to other users" })
		if err != nil || told != (mode != 0o600) {
			t.Errorf("%04o: %v, %v", mode, notices, err)
		}
	}
	if os.Getuid() != 0 { // root may all
		for _, arg := range []string{"--wal-dir=" + shut + "/wal", "--audit-log=" + shut + "/a", "--log-outputs=" + shut + "/l"} {
			if _, err := check(arg); !errors.Is(err, fs.ErrPermission) {
				t.Errorf("%s: %v", arg, err)
			}
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("%v, %v", left, err)
	}
}

// TestMemoryBudget: without the flag, the budget is a quarter of what the process may have, within its bounds.
func TestMemoryBudget(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	for available, want := range map[int64]int64{
		-1: 256 * mib, 0: 256 * mib, 1: 64 * mib, 128 * mib: 64 * mib, 200 * mib: 100 * mib, 510 * mib: 255 * mib,
		512 * mib: 256 * mib, gib: 256 * mib, 2 * gib: 512 * mib, 6 * gib: 1536 * mib, 16 * gib: 4 * gib, 1 << 40: 4 * gib,
	} {
		if got := DefaultMemoryBytes(available); got != want {
			t.Errorf("%d MiB of %d, want %d", got/mib, available/mib, want/mib)
		}
	}
	for _, args := range [][]string{{"--name=n"}, {"--name=n", "--memory-budget-bytes=0"}} {
		if c, _ := mustLoad(t, args); c.MemoryBytes != DefaultMemoryBytes(limits.Memory()) {
			t.Errorf("%v: %d", args, c.MemoryBytes)
		}
	}
}

// TestVariablesOfCommands: a node is started in the environment of who commands the cluster, and says nothing about that.
func TestVariablesOfCommands(t *testing.T) {
	for _, name := range ofCommands {
		if _, notices := mustLoad(t, []string{"--name=n"}, "SKEIN_"+name+"=x"); len(notices) > 0 {
			t.Errorf("SKEIN_%s: %v", name, notices)
		}
		if _, notices := mustLoad(t, []string{"--name=n"}, "ETCD_"+name+"=x"); len(notices) != 1 {
			t.Errorf("ETCD_%s: %v", name, notices)
		}
		if slices.ContainsFunc(Flags(), func(f Flag) bool { return strings.EqualFold(strings.ReplaceAll(f.Name, "-", "_"), name) }) {
			t.Errorf("a node has the flag %s too", name)
		}
	}
}

// TestNearest: a slip is understood, and nothing is made up.
func TestNearest(t *testing.T) {
	names := []string{"start", "range", "node", "placement", "cluster", "initial-cluster", "initial-ranges", "up"}
	for word, want := range map[string]string{
		"strt": "start", "rnage": "range", "Nodes": "node", "placment": "placement", "clsuter": "cluster", "initial-clster": "initial-cluster",
		"initial-range": "initial-ranges", "initialclusters": "initial-cluster", "dog": "", "ab": "", "": "", "x": "", "etcdctl": "",
	} {
		if got := Nearest(word, names); got != want {
			t.Errorf("%q means %q, want %q", word, got, want)
		}
	}
}
