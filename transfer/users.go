package transfer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
)

// usersPath is the file of the source's users: a copy of its database, or nothing if it never had any. It is kept until the
// cut-over is done, since the source may be shut down before.
func (m *mirrored) usersPath() string { return filepath.Join(m.o.Dir, "users.db") }

const (
	// asksOfSource is how often a source that does not answer is asked for its users before the copy of them is taken.
	asksOfSource = 3
	// askWithin bounds one of them where the source's DialTimeout does not.
	askWithin = 15 * time.Second
	// silentFor is how long a node of the target is silent before a cut-over is refused for it: some liveness timeouts.
	silentFor = 5 * time.Second
	// askPause is the pause before the target is asked again which of its nodes answer.
	askPause = 200 * time.Millisecond
	// copyPause is the pause before the source's users are copied again.
	copyPause = time.Second
)

// lastUsers has users be those of the source, or, if it does not answer, those that were copied before it had to stand still.
func (m *mirrored) lastUsers(ctx context.Context) error {
	err := m.copyUsers(ctx)
	if !silent(err) || ctx.Err() != nil {
		m.unanswered = 0
		return err
	}
	if m.unanswered++; m.unanswered < asksOfSource {
		return err
	}
	info, none := os.Stat(m.usersPath())
	if none != nil {
		return errors.Join(err, none)
	}
	m.c.Report("the source does not answer; its users are those of the copy of %s: %v", info.ModTime().UTC().Format(time.RFC3339), err)
	if m.users = nil; info.Size() > 0 {
		m.users, err = usersOf(ctx, m.usersPath())
		return err
	}
	return nil
}

// prepare has users be those of the source. If they are checked, each node has to note that before the cluster serves anybody,
// so a node that is silent would keep the source's clients waiting.
func (m *mirrored) prepare(ctx context.Context) error {
	if err := m.copyUsers(ctx); err != nil {
		return err
	}
	if m.users == nil || !m.users.Enabled {
		return nil
	}
	return unlessSilent(ctx, m.c.Clock, func() ([]*adminpb.Node, error) {
		l, err := adminpb.NewAdminClient(m.c.Client.ActiveConnection()).NodeList(ctx, &adminpb.NodeListRequest{})
		return l.GetNodes(), err
	})
}

// unlessSilent returns once all nodes answer, or refuses a cut-over after silentFor. Some nodes hear a
// node that has just started before others do. So who asked for a cut-over may know more than the node that lists them here.
func unlessSilent(ctx context.Context, c clock.Clock, list func() ([]*adminpb.Node, error)) error {
	for end := c.Now().Add(silentFor); ; {
		nodes, err := list()
		if err != nil {
			return fmt.Errorf("ask which nodes of the cluster answer: %w", err)
		}
		if err := refusedBy(nodes); err == nil || c.Now() >= end {
			return err
		}
		if err := clock.Sleep(ctx, c, askPause); err != nil {
			return err
		}
	}
}

// refusedBy is the refusal of a cut-over that would wait for nodes, nil if it would for none. A node that has never served
// need not note anything.
func refusedBy(nodes []*adminpb.Node) error {
	var silent []string
	for _, n := range nodes {
		switch n.GetState() {
		case fsm.NodeUnstarted.String(), fsm.NodeUnstartedLearner.String(), fsm.NodeRemoved.String():
		default:
			if !n.GetAlive() {
				silent = append(silent, fmt.Sprintf("%s (%s)", n.GetName(), n.GetId()))
			}
		}
	}
	if len(silent) == 0 {
		return nil
	}
	return &mirror.Refusal{
		Reason: "each node has to note that users are checked before the cluster serves anybody, and these do not answer: " + strings.Join(silent, ", "),
		Next: "start them, or take them out for good: with `skein node decommission` and `skein node remove` where other nodes can take their replicas, " +
			"else with `etcdctl member remove`; then cut over again",
	}
}

// copyUsers has users be those of the source. Their passwords are in the source's database only, so it is copied once more
// where there are any, and again if they have changed since. The first call comes before the source has to stand still.
func (m *mirrored) copyUsers(ctx context.Context) error {
	if m.source == nil {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cfg := m.o.Source
	cfg.DialOptions = append(slices.Clip(cfg.DialOptions), m.source.Own())
	if cfg.Context = ctx; cfg.DialTimeout == 0 {
		cfg.DialTimeout = askWithin
	}
	c, err := clientv3.New(cfg)
	if err != nil {
		return fmt.Errorf("ask the source whether it has users: %w", err)
	}
	defer c.Close()
	for copied := false; ; copied = true {
		ask, done := clock.WithTimeout(ctx, m.c.Clock, cfg.DialTimeout)
		st, err := c.AuthStatus(ask)
		if err != nil && errors.Is(context.Cause(ask), context.DeadlineExceeded) {
			err = context.DeadlineExceeded
		}
		done()
		switch {
		case err != nil:
			return fmt.Errorf("ask the source whether it has users: %w", err)
		case m.users == nil && !st.Enabled && st.AuthRevision <= 1: // it never had any
			return m.keepUsers(func(*os.File) error { return nil })
		case m.users != nil && m.users.Enabled == st.Enabled && m.users.Revision == st.AuthRevision:
			return nil
		}
		if copied {
			if err := clock.Sleep(ctx, m.c.Clock, copyPause); err != nil {
				return err
			}
		}
		err = m.keepUsers(func(f *os.File) error { return m.source.Snapshot(ctx, 0, f) })
		if err == nil {
			m.users, err = usersOf(ctx, m.usersPath())
		}
		if err != nil {
			return fmt.Errorf("copy the source's users: %w", err)
		}
	}
}

// keepUsers writes the file of users. The one before stays until that is done.
func (m *mirrored) keepUsers(write func(f *os.File) error) error {
	part := m.usersPath() + ".part"
	f, err := os.OpenFile(part, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(write(f), f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(part))
	}
	if err := os.Rename(part, m.usersPath()); err != nil {
		return err
	}
	dir, err := os.Open(m.o.Dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// usersOf returns the users and roles of a copy.
func usersOf(ctx context.Context, path string) (*rights.State, error) {
	db, err := etcdfile.Open(ctx, path, etcdfile.Options{})
	if err != nil {
		return nil, err
	}
	s, err := db.Info().Auth.Rights()
	return s, errors.Join(err, db.Close())
}

// silent says that an error is of a source that does not answer.
func silent(err error) bool {
	if err == nil {
		return false
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, clientv3.ErrNoAvailableEndpoints) {
		return true
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded:
		return true
	default:
		return errors.Is(rpctypes.Error(err), rpctypes.ErrNoLeader)
	}
}
