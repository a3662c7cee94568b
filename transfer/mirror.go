package transfer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/mirror/diff"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
)

// MirrorOptions say what is mirrored.
type MirrorOptions struct {
	// Source is the configuration of clients of the source, in the name of a user who may read everything.
	Source clientv3.Config
	// Dir is the mirror's: what it has received, a copy of the source, and how far it is.
	Dir string
	// Number names a new mirror: random, never 0.
	Number uint64
	// WithoutAuth leaves users and roles out.
	WithoutAuth bool
	// Progress, if not nil, gets the status each second.
	Progress func(mirror.Status)
	// SweepEvery is the pause between two looks for leases that have ended at the source; 0 for half a minute.
	SweepEvery time.Duration
	// MaxVersionBytes bounds key and value of one version. 0 is what nodes take by their defaults.
	MaxVersionBytes int64
}

// Mirror makes a new cluster what a running etcd is, and follows it until the cluster takes its place.
func Mirror(ctx context.Context, c *Cluster, o MirrorOptions) (err error) {
	source, err := mirror.NewEtcd(o.Source, c.Clock)
	if silent(err) && stepOf(o.Dir) == mirror.Finishing {
		// Nothing more is needed of the source, which may have been shut down. Without a user it is not asked at once.
		o := o.Source
		o.Username, o.Password = "", ""
		source, err = mirror.NewEtcd(o, c.Clock)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	m := &mirrored{c: c, o: o}
	var told clock.Time
	run := mirror.Options{
		FS: vfs.Default, Dir: o.Dir, Clock: c.Clock, Source: source, SourceData: source.Data(), Target: m, TargetData: loaded{diff.NewEndpoint(c.Client), m},
		SnapshotRevision: func(path string) (keyspace.Revision, error) { return fileRevision(ctx, path) },
		Nonce:            strconv.FormatUint(o.Number, 16),
		SweepEvery:       o.SweepEvery,
		Progress: func(s mirror.Status) {
			if o.Progress != nil {
				o.Progress(s)
			}
			if now := c.Clock.Now(); told == 0 || now.Sub(told) >= reportEvery {
				told = now
				c.Report("%s", s)
			}
		},
	}
	if !o.WithoutAuth {
		m.source = source
		run.Prepare = m.prepare
	}
	err = mirror.Run(ctx, run)
	if step := stepOf(o.Dir); step == mirror.Done || step == mirror.Abandoned {
		if gone := os.Remove(m.usersPath()); !errors.Is(gone, os.ErrNotExist) {
			err = errors.Join(err, gone)
		}
	}
	return err
}

// By its text about the source the cluster tells people and MirrorOf where its mirror is.
const (
	sourceName = "a running etcd"
	sourceForm = sourceName + ", by the mirror in %q on %q"
)

func sourceText(dir string) string {
	host, err := os.Hostname()
	if err != nil {
		return sourceName
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return sourceName
	}
	if text := fmt.Sprintf(sourceForm, dir, host); len(text) <= fsm.MaxSourceBytes {
		return text
	}
	return sourceName
}

// MirrorOf returns the directory of the mirror that loads a cluster, or has loaded it. The error says what to do if it is
// not on this machine, or not known.
func MirrorOf(ctx context.Context, c *Cluster) (dir string, err error) {
	a, err := datapb.NewLoadClient(c.Client.ActiveConnection()).LoadState(ctx, &datapb.LoadStateRequest{Limit: 1})
	if err != nil {
		return "", fmt.Errorf("ask the cluster for its mirror: %w", err)
	}
	st := a.GetStatus()
	var host string
	if st.GetPhase() == datapb.LoadPhase_LOAD_NONE {
		return "", errors.New("no mirror has begun to load this cluster: give --endpoints of one that has, or the directory of the mirror to --spool")
	}
	if _, err := fmt.Sscanf(st.GetSource(), sourceForm, &dir, &host); err != nil {
		return "", fmt.Errorf("the source of this cluster is %s, which does not tell where a mirror is: give its directory to --spool", st.GetSource())
	}
	if here, err := os.Hostname(); err != nil || here != host {
		return "", fmt.Errorf("the mirror of this cluster is in %s on %s: give the command there, or the directory to --spool", dir, host)
	}
	nonce, err := mirror.Nonce(vfs.Default, dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("the mirror of this cluster is in %s, which cannot be read: %w", dir, err)
	}
	if err != nil || nonce != strconv.FormatUint(st.GetLoader(), 16) {
		return "", fmt.Errorf("the mirror of this cluster was in %s and is not there any more: give its directory to --spool", dir)
	}
	return dir, nil
}

// stepOf returns how far the mirror in a directory is, nothing if that cannot be read.
func stepOf(dir string) mirror.Step {
	st, err := mirror.ReadStatus(vfs.Default, dir)
	if err != nil {
		return ""
	}
	return st.Step
}

func fileRevision(ctx context.Context, path string) (keyspace.Revision, error) {
	db, err := etcdfile.Open(ctx, path, etcdfile.Options{})
	if err != nil {
		return 0, err
	}
	return db.Info().Revision, db.Close()
}

// mirrored is a cluster as the target of a mirror.
type mirrored struct {
	c *Cluster
	o MirrorOptions

	// mu is held over each call.
	mu sync.Mutex
	// loader is that of the nonce, nil before the first call. begun says that it knows the position.
	loader  *dataapi.Loader
	begun   bool
	granted map[keyspace.LeaseID]int64

	// source has users to bring, nil for none. users are those that were copied last, nil before.
	source *mirror.Etcd
	users  *rights.State
	// unanswered counts how often in a row Finish asked the source for its users in vain.
	unanswered int
}

var _ mirror.Target = (*mirrored)(nil)

// use returns the loader with a nonce. mu is held.
func (m *mirrored) use(nonce string) (*dataapi.Loader, uint64, error) {
	number, err := strconv.ParseUint(nonce, 16, 64)
	if err != nil || number == 0 {
		return nil, 0, fmt.Errorf("the mirror in %s names its load %q, and a number in hexadecimal above 0 is meant: the file was changed by hand", m.o.Dir, nonce)
	}
	if m.loader == nil {
		m.granted = map[keyspace.LeaseID]int64{}
		m.loader = dataapi.NewLoader(dataapi.LoaderOptions{Conn: m.c.Client.ActiveConnection(), Clock: m.c.Clock, Number: number, Source: sourceText(m.o.Dir)})
	}
	return m.loader, number, nil
}

// State implements mirror.Target.
func (m *mirrored) State(ctx context.Context, nonce string) (mirror.Phase, keyspace.Revision, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, number, err := m.use(nonce)
	if err != nil {
		return "", 0, err
	}
	st, _, err := l.State(ctx)
	if err != nil {
		return "", 0, err
	}
	phase := st.GetPhase()
	if phase != datapb.LoadPhase_LOAD_NONE && st.GetLoader() != number {
		return "", 0, fmt.Errorf("the cluster belongs to the load of %s by loader %016x, and not to this mirror's, %016x: give the --endpoints of the cluster that this mirror began with", st.GetSource(), st.GetLoader(), number)
	}
	switch phase {
	case datapb.LoadPhase_LOAD_NONE:
		return mirror.TargetEmpty, 0, nil
	case datapb.LoadPhase_LOAD_BULK, datapb.LoadPhase_LOAD_FOLLOW:
		return mirror.TargetLoading, keyspace.Revision(st.GetPosition()), nil
	case datapb.LoadPhase_LOAD_FINISHED:
		return mirror.TargetServing, keyspace.Revision(st.GetPosition()), nil
	case datapb.LoadPhase_LOAD_ABANDONED:
		return mirror.TargetAbandoned, 0, nil
	default:
		return "", 0, fmt.Errorf("the cluster's load is in phase %d, which this build does not know", phase)
	}
}

// Import implements mirror.Target.
func (m *mirrored) Import(ctx context.Context, nonce, path string) (in mirror.Imported, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loader, m.begun = nil, false // the sum begins anew
	loader, _, err := m.use(nonce)
	if err != nil {
		return in, err
	}
	l, done, err := loadOfFile(ctx, m.c, &ImportOptions{Path: path, WithoutAuth: true, TempDir: m.o.Dir, MaxVersionBytes: m.o.MaxVersionBytes})
	if err != nil {
		return in, err
	}
	defer done()
	p, err := l.bring(ctx, m.c, loader)
	if err != nil {
		return in, err
	}
	if p == nil {
		return in, errors.New("the cluster was opened before its import had ended: the mirror's directory is older than the cluster")
	}
	for _, lease := range l.leases {
		m.granted[lease.ID] = lease.TTL
	}
	in.Revision, in.Compacted = l.revision, l.compacted
	in.Sum.Versions, in.Sum.Hashes = loader.Sum().Versions, loader.Sum().Hashes
	if err := loader.EndBulk(ctx, l.revision); err != nil {
		return in, fmt.Errorf("end the import: %w", err)
	}
	m.begun = true
	return in, nil
}

// begin has the loader go on where an earlier one was.
func (m *mirrored) begin(ctx context.Context, nonce string) (*dataapi.Loader, error) {
	l, _, err := m.use(nonce)
	if err != nil || m.begun {
		return l, err
	}
	_, err = l.Begin(ctx)
	m.begun = err == nil
	return l, err
}

// grant grants the leases that are not known to be granted with these TTLs, and takes those back that have ended.
func (m *mirrored) grant(ctx context.Context, l *dataapi.Loader, ttls map[keyspace.LeaseID]int64, ended []keyspace.LeaseID) error {
	var missing []dataapi.LoadLease
	for id, ttl := range ttls {
		if m.granted[id] != ttl {
			missing = append(missing, dataapi.LoadLease{ID: id, TTL: ttl})
		}
	}
	if err := l.Leases(ctx, missing, ended); err != nil {
		return fmt.Errorf("grant %d leases, take back %d: %w", len(missing), len(ended), err)
	}
	for _, lease := range missing {
		m.granted[lease.ID] = lease.TTL
	}
	for _, id := range ended {
		delete(m.granted, id)
	}
	return nil
}

// Follow implements mirror.Target.
func (m *mirrored) Follow(ctx context.Context, nonce string, b mirror.Batch) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, err := m.begin(ctx, nonce)
	if err == nil {
		err = m.grant(ctx, l, b.Leases, nil)
	}
	if err != nil {
		return err
	}
	at := l.Position()
	for len(b.Versions) > 0 && b.Versions[0].Mod <= at {
		b.Versions = b.Versions[1:] // an earlier call brought it, whose answer was lost
	}
	if err = l.Follow(ctx, b.UpTo, b.Versions); err != nil {
		m.begun = false // the position may have moved
		return err
	}
	return m.grant(ctx, l, nil, b.Ended)
}

// Finish implements mirror.Target.
func (m *mirrored) Finish(ctx context.Context, nonce string, f mirror.Finish) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, err := m.begin(ctx, nonce)
	if err != nil {
		return err
	}
	// An earlier run of the mirror may have granted some that have ended.
	if err := m.lookGranted(ctx); err != nil {
		return fmt.Errorf("list the leases of the load: %w", err)
	}
	var ended []keyspace.LeaseID
	for id := range m.granted {
		if _, lives := f.Leases[id]; !lives {
			ended = append(ended, id)
		}
	}
	if err := m.grant(ctx, l, f.Leases, ended); err != nil {
		return err
	}
	if err := m.lastUsers(ctx); err != nil {
		return err
	}
	if err := bringAccess(ctx, m.c, l, m.users); err != nil {
		return err
	}
	l.SetSum(dataapi.Sum{Versions: f.Sum.Versions, Hashes: f.Sum.Hashes})
	return l.Finish(ctx, f.Revision, f.Compacted)
}

// lookGranted reads which leases the cluster has. A cut lists them, also while clients may not.
func (m *mirrored) lookGranted(ctx context.Context) error {
	leases, err := m.leases(ctx)
	if err != nil {
		return err
	}
	m.granted = map[keyspace.LeaseID]int64{}
	for _, l := range leases {
		m.granted[l.ID] = l.TTL
	}
	return nil
}

// leases lists the cluster's leases by a cut, also while clients may not.
func (m *mirrored) leases(ctx context.Context) ([]dataapi.Lease, error) {
	client := dataapi.NewClient(m.c.Client.ActiveConnection(), m.c.Clock)
	cut, err := client.Cut(ctx, dataapi.CutOptions{Kind: dataapi.KindMirror, Owner: owner()})
	if err != nil {
		return nil, err
	}
	return cut.Leases, client.Release(ctx, cut.Hold)
}

// loaded reads a cluster that is loaded.
type loaded struct {
	*diff.Endpoint
	m *mirrored
}

// Leases implements diff.Reader.
func (l loaded) Leases(ctx context.Context) ([]keyspace.LeaseID, error) {
	leases, err := l.m.leases(ctx)
	ids := make([]keyspace.LeaseID, len(leases))
	for i := range leases {
		ids[i] = leases[i].ID
	}
	return ids, err
}

// Abandon implements mirror.Target.
func (m *mirrored) Abandon(ctx context.Context, nonce string) error {
	phase, _, err := m.State(ctx, nonce)
	if err != nil || phase == mirror.TargetEmpty {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.loader.Abandon(ctx)
}
