package etcdfile

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/bbolt"
	"go.etcd.io/etcd/server/v3/lease/leasepb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

const (
	// DefaultMaxBytes is the size up to which etcd's authors support a database.
	DefaultMaxBytes = 8 << 30
	// DefaultTransactionBytes is how much the writer collects before it goes to the file.
	DefaultTransactionBytes = 16 << 20

	// pageBytes is etcd's on most machines; a bbolt file says its own.
	pageBytes = 4096
	// recordMemoryBytes is what bbolt needs for a record of a transaction beside its bytes.
	recordMemoryBytes = 160
	// slackBytes is how far the size that is known while writing may be off: bbolt puts free
	// pages to use again. Finish knows the size.
	slackBytes = 1 << 20
	// valueBlockBytes is the memory in which values wait for the end of their transaction.
	valueBlockBytes = 1 << 20

	// A snapshot is restored under a new term, index and members. The ones in the file must
	// be there, and they mean nothing.
	consistentIndex = 1
	term            = 1
	voter           = 1
)

// EtcdVersion is a minor version of etcd.
type EtcdVersion string

// The versions for which files are written.
const (
	Etcd35 EtcdVersion = "3.5"
	Etcd36 EtcdVersion = "3.6"
	Etcd37 EtcdVersion = "3.7"
)

// Known says whether files are written for the version.
func (v EtcdVersion) Known() bool { return v == Etcd35 || v == Etcd36 || v == Etcd37 }

// storageVersion is what the file says of its form, empty before 3.6.
func (v EtcdVersion) storageVersion() string {
	if v == Etcd35 {
		return ""
	}
	return string(v) + ".0"
}

// Header says what a file has beside versions.
type Header struct {
	// Revision is the store's; the next write of an etcd with this file gets the one above.
	// At least 1.
	Revision keyspace.Revision
	// Compacted is the compacted revision, 0 for none. At most Revision.
	Compacted keyspace.Revision
	// EtcdVersion is the oldest etcd that is to restore the file. Empty is 3.5, which all
	// can restore.
	EtcdVersion EtcdVersion
	Leases      []Lease
	Auth        Auth
	// MaxBytes bounds the file. 0 is DefaultMaxBytes.
	MaxBytes int64
	// DataBytes is how many bytes keys and values have, 0 for unknown. A file that will
	// certainly be larger than MaxBytes is refused by Create.
	DataBytes int64
	// TransactionBytes bounds what is collected in memory before it goes to the file; memory
	// is about four times that. 0 is DefaultTransactionBytes.
	TransactionBytes int64
}

// Stats say what a file has.
type Stats struct {
	// Bytes is the size with the hash.
	Bytes int64
	// Records are the writes that were added.
	Records int64
}

// TooLargeError says that a file would be larger than allowed.
type TooLargeError struct {
	Bytes, MaxBytes int64
}

// Error says what helps.
func (e *TooLargeError) Error() string {
	return fmt.Sprintf("the database file would have %d bytes or more, and at most %d are allowed; etcd supports 8 GiB. "+
		"Compact the history, remove keys, or allow more", e.Bytes, e.MaxBytes)
}

// Writer writes a database file as etcdctl snapshot save does. It is used by one goroutine.
type Writer struct {
	path string
	h    Header
	db   *bbolt.DB
	tx   *bbolt.Tx
	keys *bbolt.Bucket

	pending int64 // bytes of memory in tx
	data    int64 // bytes of tx in the file
	// blocks take the values of tx, the first used of them, and then those of the next one.
	blocks [][]byte
	used   int

	last    place // of the last record, without key
	records int64
	done    bool
}

// partSuffix is that of a file that is not complete.
const partSuffix = ".part"

// Create begins a file. Nothing may have that name. Until Finish the file has the suffix
// ".part". One that a crash has left is not replaced, since another Writer may be at it.
func Create(path string, h Header) (*Writer, error) {
	if err := h.check(); err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	part := path + partSuffix
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		if err == nil {
			err = errors.New("it exists: remove it or choose another name")
		}
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	db, err := bbolt.Open(part, 0o600, &bbolt.Options{
		PageSize: pageBytes, Timeout: time.Second,
		// Finish syncs once. etcd keeps no list of free pages in its files either.
		NoSync: true, NoGrowSync: true, NoFreelistSync: true, FreelistType: bbolt.FreelistMapType,
		OpenFile: func(name string, flag int, mode os.FileMode) (*os.File, error) {
			return os.OpenFile(name, flag|os.O_EXCL, mode)
		},
		// Address space, not memory: growing the map copies what is in the transaction.
		InitialMmapSize: 1 << 30,
	})
	if errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("create %s: %s exists: another one writes it, or was broken off; then remove it", path, part)
	}
	if err != nil {
		_ = os.Remove(part) // it may be there and of no use
		return nil, fmt.Errorf("create %s: %w", part, err)
	}
	w := &Writer{path: path, h: h, db: db}
	if err := w.begin(); err != nil {
		return nil, errors.Join(fmt.Errorf("create %s: %w", part, err), w.Abort())
	}
	return w, nil
}

// check fills the defaults in.
func (h *Header) check() error {
	if h.EtcdVersion == "" {
		h.EtcdVersion = Etcd35
	}
	if h.MaxBytes == 0 {
		h.MaxBytes = DefaultMaxBytes
	}
	if h.TransactionBytes <= 0 {
		h.TransactionBytes = DefaultTransactionBytes
	}
	switch {
	case !h.EtcdVersion.Known():
		return fmt.Errorf("etcd %q: files are written for %s, %s and %s", string(h.EtcdVersion), Etcd35, Etcd36, Etcd37)
	case h.Revision < 1 || h.Revision > keyspace.MaxRevision:
		return fmt.Errorf("revision %d is not one of 1 to %d", h.Revision, keyspace.MaxRevision)
	case h.Compacted < 0 || h.Compacted > h.Revision:
		return fmt.Errorf("compacted revision %d is not one of 0 to the revision, %d", h.Compacted, h.Revision)
	case h.DataBytes > h.MaxBytes:
		return &TooLargeError{Bytes: h.DataBytes, MaxBytes: h.MaxBytes}
	}
	return nil
}

// buckets are etcd's.
var buckets = []string{
	bucketKey, bucketMeta, bucketLease, bucketAlarm, bucketCluster, bucketMembers, bucketMembersRemoved, bucketAuth, bucketUsers, bucketRoles,
}

// begin begins a transaction.
func (w *Writer) begin() error {
	tx, err := w.db.Begin(true)
	if err != nil {
		return fmt.Errorf("begin a transaction: %w", err)
	}
	w.tx, w.pending, w.data = tx, 0, 0
	if w.records == 0 {
		for _, name := range buckets {
			if _, err := tx.CreateBucketIfNotExists([]byte(name)); err != nil {
				return fmt.Errorf("create bucket %q: %w", name, err)
			}
		}
	}
	w.keys = tx.Bucket([]byte(bucketKey))
	w.keys.FillPercent = 1 // nothing will be inserted later
	return nil
}

// Add writes a version. Versions come by revision and operation, as a Sorter brings them:
// without Earlier. Where two writes of a revision have the same operation number, as those
// of one DeleteRange, the latter one gets the next number, since etcd numbers each.
func (w *Writer) Add(v *mvcc.Version) error {
	if w.done || w.tx == nil {
		panic(fmt.Sprintf("etcdfile: key %q is added to %s, which is closed", v.Key, w.path))
	}
	sub := v.Sub
	switch {
	case v.Earlier != nil:
		return fmt.Errorf("write %s: key %q at revision %d has earlier writes in one record: sort by revision first", w.path, v.Key, v.Mod)
	case len(v.Key) == 0:
		return fmt.Errorf("write %s: empty key at revision %d", w.path, v.Mod)
	case v.Mod < 1 || v.Mod > w.h.Revision:
		return fmt.Errorf("write %s: key %q at revision %d, which is not one of 1 to %d", w.path, v.Key, v.Mod, w.h.Revision)
	case v.Mod < w.last.mod:
		return fmt.Errorf("write %s: key %q at revision %d after revision %d: sort by revision first", w.path, v.Key, v.Mod, w.last.mod)
	case v.Mod == w.last.mod && sub <= w.last.sub: // no first one: a revision is above 0
		if w.last.sub == math.MaxUint32 {
			return fmt.Errorf("write %s: key %q at revision %d follows operation %d, which is the highest", w.path, v.Key, v.Mod, w.last.sub)
		}
		sub = w.last.sub + 1
	}
	w.last.mod, w.last.sub = v.Mod, sub
	if err := w.put(encodeRevision(v.Mod, sub, v.Tombstone), v); err != nil {
		return fmt.Errorf("write %s: key %q at revision %d: %w", w.path, v.Key, v.Mod, err)
	}
	w.records++
	if w.pending >= w.h.TransactionBytes {
		return w.commit()
	}
	return nil
}

// AddAll writes all versions of a sorter, whose order is ByRevision.
func (w *Writer) AddAll(ctx context.Context, s *Sorter) error {
	for {
		v, err := s.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err == nil && w.records%ctxEvery == 0:
			err = ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", w.path, err)
		}
		if err := w.Add(v); err != nil {
			return err
		}
	}
}

func (w *Writer) put(key []byte, v *mvcc.Version) error {
	value := w.value(v)
	w.pending += int64(len(key)+len(value)) + recordMemoryBytes
	w.data += int64(len(key)+len(value)) + elementBytes
	if size := w.tx.Size() + w.data; size > w.h.MaxBytes+slackBytes {
		return &TooLargeError{Bytes: size, MaxBytes: w.h.MaxBytes}
	}
	if err := w.keys.Put(key, value); err != nil {
		return fmt.Errorf("put: %w", err)
	}
	return nil
}

// value returns the value of a record, which stays until the end of the transaction.
func (w *Writer) value(v *mvcc.Version) []byte {
	need := len(v.Key) + len(v.Value) + 64
	if need > valueBlockBytes {
		return appendKeyValue(make([]byte, 0, need), v)
	}
	if w.used == 0 || cap(w.blocks[w.used-1])-len(w.blocks[w.used-1]) < need {
		if w.used == len(w.blocks) {
			w.blocks = append(w.blocks, make([]byte, 0, valueBlockBytes))
		}
		w.blocks[w.used] = w.blocks[w.used][:0]
		w.used++
	}
	block := &w.blocks[w.used-1]
	start := len(*block)
	*block = appendKeyValue(*block, v)
	return (*block)[start:len(*block):len(*block)]
}

// commit ends a transaction and begins the next.
func (w *Writer) commit() error {
	tx := w.tx
	w.tx, w.keys = nil, nil
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("write %s: %w", w.path, err)
	}
	w.used = 0 // bbolt has copied all values into the file
	if err := w.begin(); err != nil {
		return fmt.Errorf("write %s: %w", w.path, err)
	}
	return nil
}

// Finish writes all else, syncs the file and gives it its name. After an error Abort removes
// what there is. The context ends the last reading of the file, for its hash.
func (w *Writer) Finish(ctx context.Context) (Stats, error) {
	stats, err := w.finish(ctx)
	if err != nil {
		return Stats{}, fmt.Errorf("write %s: %w", w.path, err)
	}
	return stats, nil
}

func (w *Writer) finish(ctx context.Context) (Stats, error) {
	if err := w.top(); err != nil {
		return Stats{}, err
	}
	for _, f := range []func() error{w.meta, w.leases, w.auth} {
		if err := f(); err != nil {
			return Stats{}, err
		}
	}
	tx := w.tx
	w.tx = nil
	if err := tx.Commit(); err != nil {
		return Stats{}, err
	}
	size := int64(0)
	if err := w.db.View(func(tx *bbolt.Tx) error {
		size = tx.Size()
		return nil
	}); err != nil {
		return Stats{}, err
	}
	if size+sha256.Size > w.h.MaxBytes {
		return Stats{}, &TooLargeError{Bytes: size + sha256.Size, MaxBytes: w.h.MaxBytes}
	}
	if err := w.db.Close(); err != nil {
		return Stats{}, err
	}
	if err := w.seal(ctx, size); err != nil {
		return Stats{}, err
	}
	w.done = true
	return Stats{Bytes: size + sha256.Size, Records: w.records}, nil
}

// top writes a record at the revision if nothing else in the file says that it is the
// store's: one with an empty key, as etcdutl snapshot restore --bump-revision does.
func (w *Writer) top() error {
	if w.h.Revision == max(w.last.mod, w.h.Compacted, 1) {
		return nil
	}
	if err := w.keys.Put(encodeRevision(w.h.Revision, 0, false), []byte{}); err != nil {
		return fmt.Errorf("put the record of revision %d: %w", w.h.Revision, err)
	}
	return nil
}

func (w *Writer) meta() error {
	conf, err := json.Marshal(map[string]any{"voters": []uint64{voter}, "auto_leave": false})
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	records := []struct{ bucket, key, value string }{
		{bucketMeta, keyIndex, string(binary.BigEndian.AppendUint64(nil, consistentIndex))},
		{bucketMeta, keyTerm, string(binary.BigEndian.AppendUint64(nil, term))},
		{bucketMeta, keyConfState, string(conf)},
		{bucketCluster, keyClusterVersion, string(w.h.EtcdVersion) + ".0"},
	}
	if v := w.h.EtcdVersion.storageVersion(); v != "" {
		records = append(records, struct{ bucket, key, value string }{bucketMeta, keyStorageVersion, v})
	}
	if c := w.h.Compacted; c > 0 {
		rev := string(encodeRevision(c, 0, false))
		records = append(records,
			struct{ bucket, key, value string }{bucketMeta, keyScheduled, rev},
			struct{ bucket, key, value string }{bucketMeta, keyFinished, rev})
	}
	for _, r := range records {
		if err := w.tx.Bucket([]byte(r.bucket)).Put([]byte(r.key), []byte(r.value)); err != nil {
			return fmt.Errorf("put %s of bucket %q: %w", r.key, r.bucket, err)
		}
	}
	return nil
}

func (w *Writer) leases() error {
	b := w.tx.Bucket([]byte(bucketLease))
	for i := range w.h.Leases {
		l := &w.h.Leases[i]
		value, err := proto.Marshal(&leasepb.Lease{ID: int64(l.ID), TTL: l.TTLSeconds, RemainingTTL: l.RemainingSeconds})
		if err == nil {
			err = b.Put(leaseKey(l.ID), value)
		}
		if err != nil {
			return fmt.Errorf("lease %x: %w", int64(l.ID), err)
		}
	}
	return nil
}

func (w *Writer) auth() error {
	a := &w.h.Auth
	enabled := byte(0)
	if a.Enabled {
		enabled = 1
	}
	b := w.tx.Bucket([]byte(bucketAuth))
	err := errors.Join(b.Put([]byte(keyAuthEnabled), []byte{enabled}),
		b.Put([]byte(keyAuthRevision), binary.BigEndian.AppendUint64(nil, max(a.Revision, 1))))
	if err != nil {
		return fmt.Errorf("bucket %q: %w", bucketAuth, err)
	}
	put := func(bucket string, name []byte, m proto.Message) error {
		value, err := proto.Marshal(m)
		if err == nil {
			err = w.tx.Bucket([]byte(bucket)).Put(name, value)
		}
		if err != nil {
			return fmt.Errorf("%q of bucket %q: %w", name, bucket, err)
		}
		return nil
	}
	for _, u := range a.Users {
		if err := put(bucketUsers, u.Name, u); err != nil {
			return err
		}
	}
	for _, r := range a.Roles {
		if err := put(bucketRoles, r.Name, r); err != nil {
			return err
		}
	}
	return nil
}

// seal cuts the file behind its last page, appends the hash, and gives the file its name.
func (w *Writer) seal(ctx context.Context, size int64) error {
	part := w.path + partSuffix
	f, err := os.OpenFile(part, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		return err
	}
	h := sha256.New()
	if _, err := io.CopyBuffer(h, &contextReader{ctx, f}, make([]byte, copyBytes)); err != nil {
		return err
	}
	if _, err := f.WriteAt(h.Sum(nil), size); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(part, w.path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(w.path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// Abort removes an unfinished file. After Finish has succeeded it does nothing.
func (w *Writer) Abort() error {
	if w.done {
		return nil
	}
	w.done = true
	var err error
	if w.tx != nil {
		err = w.tx.Rollback()
	}
	err = errors.Join(err, w.db.Close())
	if removed := os.Remove(w.path + partSuffix); !errors.Is(removed, os.ErrNotExist) { // it has its name already
		err = errors.Join(err, removed)
	}
	if err != nil {
		return fmt.Errorf("remove the unfinished %s: %w", w.path, err)
	}
	return nil
}
