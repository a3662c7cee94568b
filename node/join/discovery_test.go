package join

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/placement/fsm"
)

// zone is what a name server says in virtual time: a second after it was asked.
type zone struct {
	mu sync.Mutex
	// Guarded by mu. srv are the targets of the one service, port 2380, and hosts the addresses. Names in silent get no answer,
	// names in failing a failure.
	srv             []string
	hosts           map[string][4]byte
	silent, failing string
}

func (z *zone) set(change func()) {
	z.mu.Lock()
	defer z.mu.Unlock()
	change()
}

// resolver asks the zone. Package net makes what outlives a bubble at its first look, so this has one outside.
func (z *zone) resolver(t *testing.T) *net.Resolver {
	t.Helper()
	r := &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("nobody there") }}
	if _, err := r.LookupNetIP(t.Context(), "ip", "skein.test"); err == nil {
		t.Fatal("an address from nowhere")
	}
	return &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		here, there := net.Pipe()
		go z.serve(there)
		return here, nil
	}}
}

// serve answers as over TCP: each message has its length before it.
func (z *zone) serve(conn net.Conn) {
	defer conn.Close()
	for {
		b := make([]byte, 2)
		if _, err := io.ReadFull(conn, b); err != nil {
			return
		}
		b = make([]byte, binary.BigEndian.Uint16(b))
		if _, err := io.ReadFull(conn, b); err != nil {
			return
		}
		time.Sleep(time.Second)
		if a := z.answer(b); a != nil {
			_, _ = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(a))), a...))
		}
	}
}

// answer is nil for silence.
func (z *zone) answer(query []byte) []byte {
	z.mu.Lock()
	defer z.mu.Unlock()
	var q dnsmessage.Message
	if err := q.Unpack(query); err != nil {
		panic(err) // of the test
	}
	ask := q.Questions[0]
	name := strings.TrimSuffix(ask.Name.String(), ".")
	a := dnsmessage.Message{Header: dnsmessage.Header{ID: q.ID, Response: true, Authoritative: true, RecursionAvailable: true}, Questions: q.Questions}
	header := dnsmessage.ResourceHeader{Name: ask.Name, Type: ask.Type, Class: dnsmessage.ClassINET}
	ip, isHost := z.hosts[name]
	switch {
	case z.silent != "" && strings.HasPrefix(name, z.silent):
		return nil
	case z.failing != "" && strings.HasPrefix(name, z.failing):
		a.RCode = dnsmessage.RCodeServerFailure
	case name == "_etcd-server._tcp.skein.test":
		for _, target := range z.srv {
			a.Answers = append(a.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.SRVResource{Target: dnsmessage.MustNewName(target + "."), Port: 2380}})
		}
	case !isHost:
		a.RCode = dnsmessage.RCodeNameError
	case ask.Type == dnsmessage.TypeA:
		a.Answers = append(a.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.AResource{A: ip}})
	}
	b, err := a.Pack()
	if err != nil {
		panic(err) // of the test
	}
	return b
}

// discoverer is a founder at 10.0.0.1 that SRV records of skein.test are to name. asked is called at each of its warnings.
func discoverer(t *testing.T, z *zone, r *net.Resolver, asked func(warning string)) *Joiner {
	t.Helper()
	c := config.Default()
	c.Name, c.DiscoverySRV, c.AdvertisePeerURLs = "n1", "skein.test", []url.URL{{Scheme: "http", Host: "10.0.0.1:2380"}}
	c.Complete()
	log := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(io.Discard), zap.WarnLevel), zap.Hooks(func(e zapcore.Entry) error { z.set(func() { asked(e.Message) }); return nil }))
	return &Joiner{Config: c, Resolver: r, Clock: clock.Virtual(), Logger: log}
}

// A name server that says nothing of a host, or fails for one while it knows nothing of another, is asked again.
func TestHostsOfSRVRecordsThatAreNotAnsweredAreAskedForAgain(t *testing.T) {
	for _, c := range []struct {
		what            string
		silent, failing string
	}{
		{what: "it is silent on all hosts", silent: "a."},
		{what: "it fails", failing: "a."},
	} {
		t.Run(c.what, func(t *testing.T) {
			z := &zone{srv: []string{"unknown.skein.test", "a.skein.test"}, hosts: map[string][4]byte{"a.skein.test": {10, 0, 0, 1}}, silent: c.silent, failing: c.failing}
			r := z.resolver(t)
			synctest.Test(t, func(t *testing.T) {
				times := 0
				j := discoverer(t, z, r, func(string) {
					if times++; times == 3 {
						z.silent, z.failing = "", ""
					}
				})
				found, err := j.discovered(t.Context())
				if err != nil || times != 3 {
					t.Fatalf("%v; it said %d times that it asks again", err, times)
				}
				if own := found.Config.InitialCluster["n1"]; len(own) != 1 || own[0].Host != "a.skein.test:2380" {
					t.Errorf("founders %v", found.Config.InitialCluster)
				}
			})
		})
	}
}

// Many silent hosts take no longer than one.
func TestHostsOfSRVRecordsAreLookedUpSideBySide(t *testing.T) {
	z := &zone{silent: "h", hosts: map[string][4]byte{"a.skein.test": {10, 0, 0, 1}}}
	for _, h := range strings.Split("abcdefgh", "") {
		z.srv = append(z.srv, "h"+h+".skein.test")
	}
	r := z.resolver(t)
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if _, err := discoverer(t, z, r, func(string) {}).lookUp(t.Context()); !passing(err) {
			t.Errorf("a name server that is silent: %v", err)
		}
		if took := time.Since(began); took > 2*lookUpTimeout {
			t.Errorf("it took %s", took)
		}
	})
}

// The ids come out of the hosts, which resolvers may return in any case.
func TestTheCaseOfSRVRecordsDoesNotMatter(t *testing.T) {
	z := &zone{hosts: map[string][4]byte{}}
	r := z.resolver(t)
	synctest.Test(t, func(t *testing.T) {
		var all []string
		for _, host := range []string{"a.skein.test", "A.Skein.test"} {
			z.set(func() { z.srv = []string{host, "b.skein.test"} })
			j := discoverer(t, z, r, func(string) {})
			j.Config.AdvertisePeerURLs[0].Host = "a.SKEIN.test:2380"
			found, err := j.discovered(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			boot, err := found.Config.Bootstrap()
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, boot.Cluster.String()+" "+boot.Self.String())
		}
		if len(slices.Compact(all)) != 1 {
			t.Errorf("clusters and nodes %q", all)
		}
	})
}

// A founder that was started before, and has not been admitted, waits for its name server as at its first start. Records that
// have changed meanwhile are an error that says so.
func TestAFounderThatIsNotAdmittedYetWaitsForSRVRecords(t *testing.T) {
	for _, c := range []struct {
		what    string
		changed []string
		error   string
	}{
		{what: "the same records"},
		{what: "another founder", changed: []string{"a.skein.test", "c.skein.test"}, error: "contradicts the data directory of node "},
		{what: "not this one", changed: []string{"b.skein.test"}, error: "which was not admitted yet: --discovery-srv: none of the SRV records"},
	} {
		t.Run(c.what, func(t *testing.T) {
			z := &zone{srv: []string{"a.skein.test", "b.skein.test"}, hosts: map[string][4]byte{"a.skein.test": {10, 0, 0, 1}, "b.skein.test": {10, 0, 0, 2}, "c.skein.test": {10, 0, 0, 3}}}
			r := z.resolver(t)
			synctest.Test(t, func(t *testing.T) {
				asked := false
				j := discoverer(t, z, r, func(string) { asked, z.silent = true, "" })
				j.FS = vfs.NewMem()
				first, err := j.Find(t.Context())
				if err != nil || len(first.Founders) != 2 {
					t.Fatalf("%+v, %v", first, err)
				}
				z.set(func() {
					z.silent = "_etcd"
					if c.changed != nil {
						z.srv = c.changed
					}
				})
				m, err := j.again(t.Context(), &engine.Identity{Cluster: first.Cluster, Node: first.Self})
				if err != nil || m.Anew == nil {
					t.Fatalf("%+v, %v", m, err)
				}
				m, err = m.Anew(t.Context())
				if err == nil && m.Peers != nil {
					_, err = m.Peers(t.Context())
				}
				switch {
				case !asked:
					t.Error("it has not asked again")
				case c.error == "" && (err != nil || m.Self != first.Self || !slices.EqualFunc(m.Founders, first.Founders, func(x, y fsm.Node) bool { return x.ID == y.ID })):
					t.Errorf("%+v, %v", m, err)
				case c.error != "" && (err == nil || !strings.Contains(err.Error(), c.error)):
					t.Errorf("%v; want %s", err, c.error)
				}
			})
		})
	}
}
