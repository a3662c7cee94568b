package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// usersOptions are the command line of the measure.
type usersOptions struct {
	pairs, roles, clients, conns, logins, changes int
	turn                                          time.Duration
}

func usersFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o usersOptions
	set.IntVar(&o.pairs, "pairs", 5, "turns with users checked, and as many without")
	set.DurationVar(&o.turn, "turn", 5*time.Second, "length of a turn of puts, and of one of gets")
	set.IntVar(&o.roles, "roles", 1000, "roles of the user, each with 10 permissions")
	set.IntVar(&o.clients, "clients", 64, "clients at a time")
	set.IntVar(&o.conns, "conns", 12, "connections")
	set.IntVar(&o.logins, "logins", 10_000, "logins at once")
	set.IntVar(&o.changes, "changes", 1000, "changes of rights under load")
	return func(ctx context.Context, b *bench) error {
		if o.pairs < 1 || o.roles < 1 || o.conns < nodes || o.clients < o.conns {
			return fmt.Errorf("users: %d pairs, %d roles, %d clients on %d connections: at least one of each, and a connection to each node", o.pairs, o.roles, o.clients, o.conns)
		}
		return users(ctx, b, o)
	}
}

const (
	benchUser, benchPassword = "u", "secret"
	rootUser, rootPassword   = "root", "rootsecret"
	usersPrefix              = "users/"
	usersKeys                = 10_000
)

// A userSide is a cluster of Skein whose users are known in one way.
type userSide struct {
	*cluster
	certs   string // directory of certificates; empty without TLS
	checked bool   // users are checked
}

// users measures puts and gets with users checked beside those without, on the same cluster by turns, for
// each way to know a user. Then it measures changes of rights: how long a revocation takes, also with a dead
// node, many at once under load, and many logins beside puts.
func users(ctx context.Context, b *bench, o usersOptions) error {
	all := map[string]map[string][]figureSet{}
	t := table.New("puts and gets a second", "off: all", "on: all", "off: median", "on: median", "on / off: median (lowest to highest)")
	for _, way := range []string{"simple token", "JWT", "common name"} {
		s, err := b.userSide(ctx, way)
		if err != nil {
			return err
		}
		err = b.with(ctx, []*cluster{s.cluster}, func() error {
			runs, err := s.byTurns(ctx, o)
			all[way] = runs
			if err != nil || way != "simple token" {
				return err
			}
			return s.changes(ctx, o)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", way, err)
		}
		for _, name := range []string{"puts", "gets", "puts" + inOwn, "gets" + inOwn} {
			off, on := column(all[way]["off"], name), column(all[way]["on"], name)
			t.Add(name+", "+way, strings.Join(table.Numbers(off), " "), strings.Join(table.Numbers(on), " "), table.Number(table.Median(off)), table.Number(table.Median(on)), table.Spread(on, off))
		}
	}
	t.Write(os.Stdout, fmt.Sprintf("%d clients on %d connections, turns of %v, a user of %d roles", o.clients, o.conns, o.turn, o.roles))
	return b.save("users.json", all)
}

// userSide makes a cluster of Skein, not started.
func (b *bench) userSide(ctx context.Context, way string) (*userSide, error) {
	switch way {
	case "simple token":
		return &userSide{cluster: b.skein("--initial-ranges", "8")}, nil
	case "JWT":
		key := filepath.Join(b.dir, "jwt.key")
		if err := os.WriteFile(key, []byte(strings.Repeat("a key of JWT ", 5)), 0o600); err != nil {
			return nil, err
		}
		return &userSide{cluster: b.skein("--initial-ranges", "8", "--auth-token", "jwt,sign-method=HS256,priv-key="+key)}, nil
	}
	s := &userSide{cluster: b.skein(), certs: filepath.Join(b.dir, "certs")}
	calls := [][]string{{"create-ca"}, {"create-client", rootUser}, {"create-client", benchUser}}
	for i := range nodes {
		calls = append(calls, []string{"create-node", nodeName(i), "--host", "127.0.0.1", "--out", filepath.Join(b.dir, "certs-"+nodeName(i))})
	}
	for _, args := range calls {
		cmd := exec.CommandContext(ctx, s.binary, append(append([]string{"cert"}, args...), "--certs-dir", s.certs)...)
		if text, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s: %w\n%s", cmd, err, text)
		}
	}
	// The pages of health and metrics stay without TLS, at a port of their own.
	s.web = func(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", s.port+10*i+2) }
	plain := etcdArgs("--initial-ranges", "8")
	s.args = func(c *cluster, i int) []string {
		args := plain(c, i)
		for j := range args {
			if strings.HasPrefix(args[j], "http://") {
				args[j] = "https" + strings.TrimPrefix(args[j], "http")
			}
			args[j] = strings.ReplaceAll(args[j], "=http://", "=https://")
		}
		return append(args, "--certs-dir", filepath.Join(b.dir, "certs-"+nodeName(i)), "--listen-metrics-urls", s.web(i))
	}
	return s, nil
}

// connectAs makes a client of one node. Without a name it is nobody's; with TLS it has the certificate of
// the user in every case.
func (s *userSide) connectAs(i int, name, password string) (*clientv3.Client, error) {
	o := clientv3.Config{Endpoints: []string{s.clientURL(i)}, Logger: zap.NewNop(), DialTimeout: startLimit}
	if s.certs == "" {
		o.Username, o.Password = name, password
		return clientv3.New(o)
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(s.certs, "client."+name+".crt"), filepath.Join(s.certs, "client."+name+".key"))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(filepath.Join(s.certs, "ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	o.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, MinVersion: tls.VersionTLS12}
	o.Endpoints = []string{"https://" + s.clientAddr(i)}
	return clientv3.New(o)
}

// root makes root's client, with its password if users are checked.
func (s *userSide) root(checked bool) (*clientv3.Client, error) {
	if s.certs == "" && !checked {
		return s.connectAs(0, "", "")
	}
	return s.connectAs(0, rootUser, rootPassword)
}

// setUp makes root, and the user with its roles. Only one of these covers the keys that are used.
func (s *userSide) setUp(ctx context.Context, c *clientv3.Client, o usersOptions) error {
	var wrong []error
	note := func(_ any, err error) { wrong = append(wrong, err) }
	note(c.UserAdd(ctx, rootUser, rootPassword))
	note(c.UserGrantRole(ctx, rootUser, "root"))
	note(c.UserAdd(ctx, benchUser, benchPassword))
	for i := range o.roles {
		role := fmt.Sprintf("r%04d", i)
		note(c.RoleAdd(ctx, role))
		for p := range 10 {
			from := fmt.Sprintf("other/%04d/%d", i, p)
			to := clientv3.GetPrefixRangeEnd(from)
			if i == o.roles/2 && p == 5 {
				from, to = usersPrefix, clientv3.GetPrefixRangeEnd(usersPrefix)
			}
			note(c.RoleGrantPermission(ctx, role, from, to, clientv3.PermissionType(clientv3.PermReadWrite)))
		}
		note(c.UserGrantRole(ctx, benchUser, role))
	}
	return errors.Join(wrong...)
}

// byTurns loads the cluster with users checked and without.
func (s *userSide) byTurns(ctx context.Context, o usersOptions) (map[string][]figureSet, error) {
	c, err := s.root(false)
	if err != nil {
		return nil, err
	}
	err = s.setUp(ctx, c, o)
	if err = errors.Join(err, c.Close()); err != nil {
		return nil, fmt.Errorf("set up: %w", err)
	}
	return paired(o.pairs, []string{"off", "on"}, func(side string, _ int) (f figureSet, err error) {
		if err := s.check(ctx, side == "on"); err != nil {
			return nil, err
		}
		l, err := s.load(side == "on", o)
		if err != nil {
			return nil, err
		}
		defer l.close()
		f = figureSet{}
		for _, kind := range []string{"warm", "puts", "gets"} {
			before, err := s.cpu()
			if err != nil {
				return nil, err
			}
			ownBefore, err := cpuTime(os.Getpid())
			if err != nil {
				return nil, err
			}
			n, err := l.run(ctx, kind != "gets", o.turn)
			if err != nil {
				return nil, err
			}
			own, err := cpuTime(os.Getpid())
			if err != nil {
				return nil, err
			}
			after, err := s.cpu()
			if err != nil {
				return nil, err
			}
			f[kind], f[kind+", servers' µs each"] = float64(n)/o.turn.Seconds(), micros(after-before)/float64(max(n, 1))
			f[kind+inOwn] = float64(after-before) / float64(max(own-ownBefore, 1))
		}
		_, err = s.settle(ctx)
		return f, err
	})
}

// inOwn ends the names of figures of the servers' processor time with the generator's as its unit. What else the machine
// does slows both, so these differ less from turn to turn than rates do.
const inOwn = ", servers' CPU in units of the generator's"

// check turns the check of users on or off.
func (s *userSide) check(ctx context.Context, on bool) error {
	if on == s.checked {
		return nil
	}
	c, err := s.root(s.checked)
	if err != nil {
		return err
	}
	defer c.Close()
	if on {
		_, err = c.AuthEnable(ctx)
	} else {
		_, err = c.AuthDisable(ctx)
	}
	if err == nil {
		s.checked = on
	}
	return err
}

// A userLoad is a closed loop of puts or gets.
type userLoad struct {
	conns   []*clientv3.Client
	clients int
	value   string
}

func (s *userSide) load(checked bool, o usersOptions) (*userLoad, error) {
	l := &userLoad{clients: o.clients, value: strings.Repeat("v", 256)}
	name, password := benchUser, benchPassword
	if !checked && s.certs == "" {
		name, password = "", ""
	}
	for i := range o.conns {
		c, err := s.connectAs(i%nodes, name, password)
		if err != nil {
			l.close()
			return nil, err
		}
		l.conns = append(l.conns, c)
	}
	return l, nil
}

func (l *userLoad) close() {
	for _, c := range l.conns {
		_ = c.Close() // nothing is under way any more
	}
}

// run makes calls for so long and returns how many were answered. One that fails ends it.
func (l *userLoad) run(ctx context.Context, puts bool, during time.Duration) (n int64, err error) {
	took, err := l.timed(ctx, puts, func() bool { return false }, during)
	return int64(len(took)), err
}

// timed makes calls until enough says so or the time is over, and returns how long each took.
func (l *userLoad) timed(ctx context.Context, puts bool, enough func() bool, during time.Duration) (took []time.Duration, err error) {
	var mu sync.Mutex
	began := time.Now()
	err = inParallel(ctx, l.clients, l.clients, func(ctx context.Context, i int) error {
		random, c := rand.New(rand.NewPCG(1, uint64(i))), l.conns[i%len(l.conns)]
		var own []time.Duration
		for time.Since(began) < during && !enough() {
			call, cancel := context.WithTimeout(ctx, pacedDeadline)
			key := fmt.Sprintf("%s%05d", usersPrefix, random.IntN(usersKeys))
			sent := time.Now()
			var err error
			if puts {
				_, err = c.Put(call, key, l.value)
			} else {
				_, err = c.Get(call, key)
			}
			cancel()
			if err != nil {
				return err
			}
			own = append(own, time.Since(sent))
		}
		mu.Lock()
		defer mu.Unlock()
		took = append(took, own...)
		return nil
	})
	return took, err
}

// changes measures changes of rights, with users checked by simple tokens.
func (s *userSide) changes(ctx context.Context, o usersOptions) error {
	if err := s.check(ctx, true); err != nil {
		return err
	}
	root, err := s.root(true)
	if err != nil {
		return err
	}
	defer root.Close()
	l, err := s.load(true, o)
	if err != nil {
		return err
	}
	defer l.close()
	t := table.New("changes of rights", "figure")

	var took []time.Duration
	for i := range 100 {
		d, err := revoke(ctx, root, i)
		if err != nil {
			return fmt.Errorf("revocation: %w", err)
		}
		took = append(took, d)
	}
	t.Add("a revocation, p50 and longest of 100, ms", fmt.Sprintf("%.1f %.1f", millis(quantile(took, 500)), millis(slices.Max(took))))

	if err := besideChanges(ctx, root, l, o.changes, t); err != nil {
		return fmt.Errorf("changes under load: %w", err)
	}
	if err := s.logins(ctx, o, l, t); err != nil {
		return fmt.Errorf("logins: %w", err)
	}

	if err := s.kill(nodes - 1); err != nil {
		return err
	}
	var dead []float64
	for i := range 10 {
		d, err := revoke(ctx, root, i)
		if err != nil {
			return fmt.Errorf("revocation with a dead node: %w", err)
		}
		dead = append(dead, millis(d))
	}
	t.Add("a revocation with a dead node, each of 10 from the kill on, ms", table.Figures(dead, "%.0f"))
	t.Write(os.Stdout, "Simple tokens, three nodes")
	return nil
}

// revoke gives a right and takes it away, and returns how long the latter took. A call that was on its way to a node that dies
// ends without an answer, as with etcd, and is made again: the time counts from the first one.
func revoke(ctx context.Context, root *clientv3.Client, i int) (time.Duration, error) {
	from := fmt.Sprintf("revoked/%d", i)
	again := func(call func() error) error {
		err := call()
		for end := time.Now().Add(askLimit); errors.Is(err, rpctypes.ErrTimeout) && time.Now().Before(end); {
			err = call()
		}
		return err
	}
	err := again(func() error {
		_, err := root.RoleGrantPermission(ctx, "r0000", from, "", clientv3.PermissionType(clientv3.PermReadWrite))
		return err
	})
	if err != nil {
		return 0, err
	}
	began := time.Now()
	err = again(func() error {
		_, err := root.RoleRevokePermission(ctx, "r0000", from, "")
		return err
	})
	if errors.Is(err, rpctypes.ErrPermissionNotGranted) {
		err = nil // the first call did it
	}
	return time.Since(began), err
}

// besideChanges gives and takes rights beside puts. Each acknowledged put has a revision of its own, and no other
// revision is handed out.
func besideChanges(ctx context.Context, root *clientv3.Client, l *userLoad, changes int, t *table.Table) error {
	first, err := root.Put(ctx, usersPrefix+"first", "")
	if err != nil {
		return err
	}
	var ended atomic.Bool
	var puts []time.Duration
	var perr error
	var wg sync.WaitGroup
	wg.Go(func() { puts, perr = l.timed(ctx, true, ended.Load, 10*time.Minute) })
	began := time.Now()
	for i := 0; i < changes && err == nil; i += 2 {
		_, err = revoke(ctx, root, i)
	}
	length := time.Since(began)
	ended.Store(true)
	wg.Wait()
	if err = errors.Join(err, perr); err != nil {
		return err
	}
	last, err := root.Put(ctx, usersPrefix+"last", "")
	if err != nil {
		return err
	}
	t.Add(fmt.Sprintf("%d changes beside puts: changes and puts a second", changes),
		fmt.Sprintf("%.0f %.0f", float64(changes)/length.Seconds(), float64(len(puts))/length.Seconds()))
	t.Add("revisions that no put has", fmt.Sprint(last.Header.Revision-first.Header.Revision-1-int64(len(puts))))
	return nil
}

// logins measures puts beside many logins that come at once from another process, and puts alone.
func (s *userSide) logins(ctx context.Context, o usersOptions, l *userLoad, t *table.Table) error {
	never := func() bool { return false }
	alone, err := l.timed(ctx, true, never, o.turn)
	if err != nil {
		return err
	}
	own, err := os.Executable()
	if err != nil {
		return err
	}
	others := exec.CommandContext(ctx, own, append([]string{loginsCommand, strconv.Itoa(o.logins), o.turn.String()}, s.endpoints()...)...)
	others.Stderr = os.Stderr
	said, err := others.StdoutPipe()
	if err != nil {
		return err
	}
	if err := others.Start(); err != nil {
		return err
	}
	beside, err := l.timed(ctx, true, never, o.turn)
	var in, refused int64
	_, scanned := fmt.Fscan(said, &in, &refused)
	if err = errors.Join(err, scanned, others.Wait()); err != nil {
		return err
	}
	t.Add(fmt.Sprintf("%d logins at once: let in, refused or not answered within %v", o.logins, o.turn), fmt.Sprintf("%d %d", in, refused))
	t.Add("put p99 alone and beside them, ms", fmt.Sprintf("%.1f %.1f", millis(quantile(alone, 990)), millis(quantile(beside, 990))))
	t.Add("puts a second alone and beside them", fmt.Sprintf("%.0f %.0f", float64(len(alone))/o.turn.Seconds(), float64(len(beside))/o.turn.Seconds()))
	return nil
}

// loginsCommand has this program be the clients of logins. They are a process of their own, as they are elsewhere:
// thousands of goroutines beside the loop of puts would measure Go's scheduler.
const loginsCommand = "logins-of-many"

// loginsOfMany logs in so many times at once, by an endpoint each in turn, and prints how many were let in and how many
// were not within the time. The arguments are the number, the time and the endpoints.
func loginsOfMany(ctx context.Context, args []string) error {
	if len(args) < 3 {
		return fmt.Errorf("%s: a number, a time and endpoints are needed, not %q", loginsCommand, args)
	}
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	during, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	var clients []*clientv3.Client
	for _, endpoint := range args[2:] {
		c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop(), DialTimeout: startLimit})
		if err != nil {
			return err
		}
		clients = append(clients, c) // they end with the process
	}
	call, cancel := context.WithTimeout(ctx, during)
	defer cancel()
	var in, refused atomic.Int64
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if _, err := clients[i%len(clients)].Authenticate(call, benchUser, benchPassword); err == nil {
				in.Add(1)
			} else {
				refused.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Println(in.Load(), refused.Load())
	return nil
}
