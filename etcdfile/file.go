package etcdfile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/lease/leasepb"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
)

// The buckets of etcd's database, and the keys of those that are not lists.
const (
	bucketKey            = "key"
	bucketMeta           = "meta"
	bucketLease          = "lease"
	bucketAlarm          = "alarm"
	bucketCluster        = "cluster"
	bucketMembers        = "members"
	bucketMembersRemoved = "members_removed"
	bucketAuth           = "auth"
	bucketUsers          = "authUsers"
	bucketRoles          = "authRoles"

	keyIndex          = "consistent_index"
	keyTerm           = "term"
	keyConfState      = "confState"
	keyStorageVersion = "storageVersion"
	keyScheduled      = "scheduledCompactRev"
	keyFinished       = "finishedCompactRev"
	keyClusterVersion = "clusterVersion"
	keyAuthEnabled    = "authEnabled"
	keyAuthRevision   = "authRevision"
)

const (
	// hashUnit: files are multiples of it, and those with a hash have the hash beyond.
	hashUnit  = 512
	copyBytes = 1 << 20
	// maxSmallBytes bounds what all buckets but those of keys and leases hold together.
	maxSmallBytes = 64 << 20
)

// Options say what Open accepts.
type Options struct {
	// SkipHashCheck accepts a file without a hash, as member/snap/db of a stopped etcd, and
	// does not compare a hash that is there.
	SkipHashCheck bool
}

// Lease is a lease of a file.
type Lease struct {
	ID keyspace.LeaseID
	// TTLSeconds is what was granted. RemainingSeconds is what etcd noted last of the rest, 0
	// if it noted nothing; then the whole TTL counts.
	TTLSeconds, RemainingSeconds int64
}

// Member is a member of the cluster that the file comes from.
type Member struct {
	ID         uint64   `json:"id"`
	Name       string   `json:"name"`
	PeerURLs   []string `json:"peerURLs"`
	ClientURLs []string `json:"clientURLs"`
}

// Info is what a file has beside its versions.
type Info struct {
	// Revision is the one that an etcd with this file has: that of the last record or of the
	// last compaction, whichever is higher, and at least 1.
	Revision keyspace.Revision
	// Compacted is the compacted revision, 0 for none. A compaction that was scheduled and
	// not finished counts: etcd finishes it as it starts.
	Compacted keyspace.Revision
	// ConsistentIndex and Term are the raft index and term up to which the file has all. Two
	// members' files are compared by them: the lower one is behind.
	ConsistentIndex, Term uint64
	// ClusterVersion and StorageVersion are etcd's, empty where an old one wrote none.
	ClusterVersion, StorageVersion string
	Members                        []Member
	// Leases are by id.
	Leases []Lease
	Alarms []*etcdserverpb.AlarmMember
	Auth   Auth
	// Bytes is the size of the database without the hash.
	Bytes int64
}

// HasLease says whether there is a lease with the id.
func (i *Info) HasLease(id keyspace.LeaseID) bool {
	_, ok := slices.BinarySearchFunc(i.Leases, id, func(l Lease, id keyspace.LeaseID) int { return cmpLease(l.ID, id) })
	return ok
}

func cmpLease(a, b keyspace.LeaseID) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// File is an open database file. Nothing writes to it.
type File struct {
	path  string
	f     *os.File
	pages *pages
	info  Info
}

// Open opens a file that etcdctl snapshot save wrote, checks its hash, and reads all but the
// versions. The context ends the reading for the hash.
func Open(ctx context.Context, path string, o Options) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open etcd's database: %w", err)
	}
	db := &File{path: path, f: f}
	if err := db.open(ctx, o); err != nil {
		f.Close()
		return nil, fmt.Errorf("open etcd's database %s: %w", path, err)
	}
	return db, nil
}

func (db *File) open(ctx context.Context, o Options) error {
	stat, err := db.f.Stat()
	if err != nil {
		return err
	}
	if !stat.Mode().IsRegular() {
		return errors.New("it is no regular file; of an etcd's directory the database is member/snap/db")
	}
	// A running etcd holds the lock exclusively.
	if err := unix.Flock(int(db.f.Fd()), unix.LOCK_SH|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return errors.New("a running etcd uses it: take a snapshot with etcdctl snapshot save, or stop that etcd")
	} else if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	size, err := db.checkHash(ctx, stat.Size(), o.SkipHashCheck)
	if err != nil {
		return err
	}
	if db.pages, err = openPages(db.f, size); err != nil {
		return err
	}
	db.info.Bytes = size
	return db.readInfo()
}

// checkHash returns the size of the database alone.
func (db *File) checkHash(ctx context.Context, size int64, skip bool) (int64, error) {
	hashed := size%hashUnit == sha256.Size
	switch {
	case hashed && skip:
		return size - sha256.Size, nil
	case skip:
		return size, nil
	case !hashed:
		return 0, errors.New("it has no hash at its end, so it was not written by etcdctl snapshot save, or it is cut. If it is a copy of a stopped etcd's member/snap/db, use --skip-hash-check")
	}
	size -= sha256.Size
	h := sha256.New()
	if _, err := io.CopyBuffer(h, &contextReader{ctx, io.NewSectionReader(db.f, 0, size)}, make([]byte, copyBytes)); err != nil {
		return 0, fmt.Errorf("read for the hash: %w", err)
	}
	want := make([]byte, sha256.Size)
	if _, err := db.f.ReadAt(want, size); err != nil {
		return 0, fmt.Errorf("read the hash: %w", err)
	}
	if got := h.Sum(nil); !bytes.Equal(got, want) {
		return 0, fmt.Errorf("%w: its hash is %x and should be %x: take the snapshot again", ErrCorrupt, got, want)
	}
	return size, nil
}

// contextReader ends a long reading.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (r *contextReader) Read(b []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(b)
}

// Info returns what the file has beside versions. It must not be changed.
func (db *File) Info() *Info { return &db.info }

// Close closes the file.
func (db *File) Close() error { return db.f.Close() }

// readInfo reads everything but versions.
func (db *File) readInfo() error {
	i := &db.info
	small := 0
	list := func(bucket string, visit func(k, v []byte) error) error {
		b, ok, err := db.pages.bucket(bucket)
		if err != nil || !ok {
			return err
		}
		err = db.pages.walk(b, func(e element) error {
			if small += len(e.key) + len(e.value); small > maxSmallBytes && bucket != bucketLease {
				return fmt.Errorf("%w: more than %d bytes beside keys and leases", ErrCorrupt, maxSmallBytes)
			}
			if e.bucket {
				return fmt.Errorf("%w: a bucket %q within it", ErrCorrupt, e.key)
			}
			return visit(e.key, e.value)
		})
		if err != nil {
			return fmt.Errorf("bucket %q: %w", bucket, err)
		}
		return nil
	}
	meta := map[string][]byte{}
	named := func(k, v []byte) error {
		meta[string(k)] = bytes.Clone(v)
		return nil
	}
	err := errors.Join(list(bucketMeta, named), list(bucketCluster, named), list(bucketAuth, named),
		list(bucketMembers, i.addMember), list(bucketAlarm, i.addAlarm),
		list(bucketUsers, i.Auth.addUser), list(bucketRoles, i.Auth.addRole))
	if err != nil {
		return err
	}
	small = 0
	if err := list(bucketLease, i.addLease); err != nil {
		return err
	}
	slices.SortFunc(i.Leases, func(a, b Lease) int { return cmpLease(a.ID, b.ID) }) // those with a negative id came last
	if err := i.readMeta(meta); err != nil {
		return err
	}
	return db.readRevision()
}

func (i *Info) addMember(_, v []byte) error {
	var m Member
	if err := json.Unmarshal(v, &m); err != nil {
		return fmt.Errorf("%w: member %.200q: %w", ErrCorrupt, v, err)
	}
	i.Members = append(i.Members, m)
	return nil
}

func (i *Info) addAlarm(k, _ []byte) error {
	m := &etcdserverpb.AlarmMember{}
	if err := proto.Unmarshal(k, m); err != nil {
		return fmt.Errorf("%w: alarm %x: %w", ErrCorrupt, k, err)
	}
	i.Alarms = append(i.Alarms, m)
	return nil
}

func (a *Auth) addUser(k, v []byte) error {
	u := &authpb.User{}
	if err := unmarshal(k, v, u, func() bool { return bytes.Equal(u.Name, k) }); err != nil {
		return err
	}
	a.Users = append(a.Users, u)
	return nil
}

func (a *Auth) addRole(k, v []byte) error {
	r := &authpb.Role{}
	if err := unmarshal(k, v, r, func() bool { return bytes.Equal(r.Name, k) }); err != nil {
		return err
	}
	a.Roles = append(a.Roles, r)
	return nil
}

func (i *Info) addLease(k, v []byte) error {
	l := &leasepb.Lease{}
	if err := unmarshal(k, v, l, func() bool { return l.ID != 0 && string(k) == string(leaseKey(keyspace.LeaseID(l.ID))) }); err != nil {
		return err
	}
	i.Leases = append(i.Leases, Lease{ID: keyspace.LeaseID(l.ID), TTLSeconds: l.TTL, RemainingSeconds: l.RemainingTTL})
	return nil
}

// unmarshal reads a record and checks that it names itself as its key does.
func unmarshal(k, v []byte, m proto.Message, named func() bool) error {
	if err := proto.Unmarshal(v, m); err != nil {
		return fmt.Errorf("%w: record %q: %w", ErrCorrupt, k, err)
	}
	if !named() {
		return fmt.Errorf("%w: record %q is one of another name", ErrCorrupt, k)
	}
	return nil
}

// readMeta reads the buckets that are not lists.
func (i *Info) readMeta(meta map[string][]byte) error {
	i.ClusterVersion, i.StorageVersion = string(meta[keyClusterVersion]), string(meta[keyStorageVersion])
	i.Auth.Enabled = bytes.Equal(meta[keyAuthEnabled], []byte{1})
	for key, to := range map[string]*uint64{keyIndex: &i.ConsistentIndex, keyTerm: &i.Term, keyAuthRevision: &i.Auth.Revision} {
		if b, ok := meta[key]; ok {
			if len(b) != 8 {
				return fmt.Errorf("%w: %s has %d bytes and not 8", ErrCorrupt, key, len(b))
			}
			*to = binary.BigEndian.Uint64(b)
		}
	}
	for _, key := range []string{keyScheduled, keyFinished} {
		if b, ok := meta[key]; ok {
			rev, _, _, err := decodeRevision(b)
			if err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
			i.Compacted = max(i.Compacted, rev)
		}
	}
	return nil
}

// readRevision finds the store's revision.
func (db *File) readRevision() error {
	db.info.Revision = max(db.info.Compacted, 1)
	b, ok, err := db.pages.bucket(bucketKey)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%w: it has no bucket %q: this is no database of etcd 3", ErrCorrupt, bucketKey)
	}
	last, err := db.pages.last(b)
	if err == nil && last != nil {
		var rev keyspace.Revision
		rev, _, _, err = decodeRevision(last)
		db.info.Revision = max(db.info.Revision, rev)
	}
	if err != nil {
		return fmt.Errorf("bucket %q: %w", bucketKey, err)
	}
	return nil
}
