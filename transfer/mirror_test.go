package transfer

import (
	"context"
	"errors"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/mirror"
)

// TestUsersOfASourceThatIsGone: a mirror that was killed while it cut over opens the cluster although the source was shut down,
// with the users that it had copied, or none if the source had none. It never takes a source for one without users that it
// has not seen.
func TestUsersOfASourceThatIsGone(t *testing.T) {
	unused, err := ports.Unused(1)
	if err != nil {
		t.Fatal(err)
	}
	for name, user := range map[string]string{"a source without users": "", "a source with users": "root"} {
		t.Run(name, func(t *testing.T) {
			source := clientv3.Config{
				Endpoints: []string{"http://127.0.0.1:" + strconv.Itoa(unused[0])}, DialTimeout: 100 * time.Millisecond, MaxUnaryRetries: 1, Logger: zap.NewNop(),
			}
			etcd, err := mirror.NewEtcd(source, clock.System())
			if err != nil {
				t.Fatal(err)
			}
			defer etcd.Close()
			source.Username, source.Password = user, user
			told := 0
			m := &mirrored{c: &Cluster{Clock: clock.System(), Report: func(string, ...any) { told++ }}, o: MirrorOptions{Source: source, Dir: t.TempDir()}, source: etcd}
			for range asksOfSource {
				if err := m.lastUsers(t.Context()); !silent(err) {
					t.Fatal(err)
				}
			}
			if user == "" {
				err = m.keepUsers(func(*os.File) error { return nil })
			} else {
				err = os.Rename(databaseWith(t, user), m.usersPath())
			}
			if err != nil {
				t.Fatal(err)
			}
			m.unanswered = 0
			for range asksOfSource - 1 {
				if err := m.lastUsers(t.Context()); !silent(err) {
					t.Fatal(err)
				}
			}
			if err := m.lastUsers(t.Context()); err != nil || told != 1 {
				t.Fatalf("told %d times, %v", told, err)
			}
			switch {
			case user == "" && m.users != nil:
				t.Errorf("%d users", len(m.users.Users()))
			case user != "" && (m.users == nil || !m.users.Enabled || m.users.Revision != 7 || len(m.users.Users()) != 1):
				t.Errorf("users: %+v", m.users)
			}
		})
	}
}

// userless is a member of cluster 8, which has no users.
type userless struct {
	etcdserverpb.UnimplementedAuthServer
}

func (userless) AuthStatus(context.Context, *etcdserverpb.AuthStatusRequest) (*etcdserverpb.AuthStatusResponse, error) {
	return &etcdserverpb.AuthStatusResponse{Header: &etcdserverpb.ResponseHeader{ClusterId: 8}, AuthRevision: 1}, nil
}

// TestUsersOfAnotherCluster: a source is not taken for one without users because a member of another cluster has none.
func TestUsersOfAnotherCluster(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, ended := grpc.NewServer(), make(chan error, 1)
	etcdserverpb.RegisterAuthServer(s, userless{})
	go func() { ended <- s.Serve(l) }()
	defer func() {
		s.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	source := clientv3.Config{Endpoints: []string{"http://" + l.Addr().String()}, Logger: zap.NewNop()}
	etcd, err := mirror.NewEtcd(source, clock.System())
	if err != nil {
		t.Fatal(err)
	}
	defer etcd.Close()
	etcd.Expect(7)
	m := &mirrored{c: &Cluster{Clock: clock.System()}, o: MirrorOptions{Source: source, Dir: t.TempDir()}, source: etcd}
	if err := m.copyUsers(t.Context()); err == nil || !strings.Contains(err.Error(), "a member of cluster 8 answers for the source, which is cluster 7") {
		t.Error(err)
	}
	if _, err := os.Stat(m.usersPath()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("users were noted: %v", err)
	}
}

// databaseWith makes a copy of a source with a user.
func databaseWith(t *testing.T, user string) string {
	t.Helper()
	path := t.TempDir() + "/db"
	w, err := etcdfile.Create(path, etcdfile.Header{Revision: 2, Auth: etcdfile.Auth{
		Enabled: true, Revision: 7,
		Users: []*authpb.User{{Name: []byte(user), Password: []byte("hash"), Roles: []string{"root"}}},
		Roles: []*authpb.Role{{Name: []byte("root")}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Finish(t.Context()); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestRefusedBy: a cut-over is refused by each node that it would wait for, and the text has the names and what to do.
func TestRefusedBy(t *testing.T) {
	node := func(name, state string, alive bool) *adminpb.Node {
		return &adminpb.Node{Id: "id-" + name, Name: name, State: state, Alive: alive}
	}
	well := []*adminpb.Node{
		node("n1", "serving", true), node("n2", "draining", true), node("n3", "unstarted", false), node("n4", "unstarted learner", false), node("n5", "removed", false),
	}
	if err := refusedBy(well); err != nil {
		t.Error(err)
	}
	for _, state := range []string{"serving", "dead", "draining", "decommissioned", "learner"} {
		var refusal *mirror.Refusal
		err := refusedBy(append(well, node("n6", state, false), node("n7", "dead", false)))
		if !errors.As(err, &refusal) || !strings.Contains(refusal.Reason, "do not answer: n6 (id-n6), n7 (id-n7)") || !strings.Contains(refusal.Next, "start them") {
			t.Errorf("%s: %v", state, err)
		}
	}
}

// TestUnlessSilent: a node that is not heard yet keeps a cut-over waiting for a moment. One that stays silent ends it.
func TestUnlessSilent(t *testing.T) {
	ask := func(ctx context.Context, heardAfter time.Duration) (took time.Duration, err error) {
		c := clock.Virtual()
		start := c.Now()
		err = unlessSilent(ctx, c, func() ([]*adminpb.Node, error) {
			return []*adminpb.Node{{Name: "n1", State: "serving", Alive: c.Now().Sub(start) >= heardAfter}}, nil
		})
		return c.Now().Sub(start), err
	}
	synctest.Test(t, func(t *testing.T) {
		if took, err := ask(t.Context(), 0); took != 0 || err != nil {
			t.Error(took, err)
		}
		if took, err := ask(t.Context(), 3*time.Second); took != 3*time.Second || err != nil {
			t.Error(took, err)
		}
		var refusal *mirror.Refusal
		if took, err := ask(t.Context(), time.Hour); took != silentFor || !errors.As(err, &refusal) {
			t.Error(took, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if took, err := ask(ctx, time.Hour); took != time.Second || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(took, err)
		}
		broken := errors.New("broken")
		if err := unlessSilent(t.Context(), clock.Virtual(), func() ([]*adminpb.Node, error) { return nil, broken }); !errors.Is(err, broken) {
			t.Error(err)
		}
	})
}
