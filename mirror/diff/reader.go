package diff

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// PageKeys is the largest number of keys in a page.
const PageKeys = 1000

// LookupKeys is the largest number of keys that are looked up at once. An etcd takes transactions of 128 operations by default.
const LookupKeys = 100

// pageBytes is the size that a page should have at most. The next page asks for fewer keys
// after one that was larger.
const pageBytes = 4 << 20

// MaxMessageBytes bounds an answer of a side, and so what one page may take in memory. A
// client that reads for this package has it as its MaxCallRecvMsgSize.
const MaxMessageBytes = 64 << 20

// ErrCompacted says that a side has removed the revision that was asked for.
var ErrCompacted = errors.New("the revision has been compacted")

// Reader reads one side. All methods may be called from many goroutines.
type Reader interface {
	// Page returns the first keys of [from, end) as they were at a revision, in order, at
	// most limit of them. A nil end is the end of the keyspace. Revision 0 is the present
	// one, read linearizably. The error is ErrCompacted if the revision is gone.
	Page(ctx context.Context, from, end []byte, revision keyspace.Revision, limit int) (Page, error)
	// Count returns the number of keys in [from, end) at a revision, and that revision.
	Count(ctx context.Context, from, end []byte, revision keyspace.Revision) (int64, keyspace.Revision, error)
	// Written returns, for each of at most LookupKeys different keys, the revision in which it was last written, 0 for one that is not there.
	// They are read linearizably.
	Written(ctx context.Context, keys [][]byte) ([]keyspace.Revision, error)
	// Leases returns the ids of all leases.
	Leases(ctx context.Context) ([]keyspace.LeaseID, error)
	// TTL returns the granted TTL of a lease in seconds, and whether the lease exists. Behind a restart of its leader an
	// etcd may say for a moment that one does not exist that was granted just before.
	TTL(ctx context.Context, id keyspace.LeaseID) (seconds int64, exists bool, err error)
}

// Page is a part of a side.
type Page struct {
	Keys []mvcc.Version
	// More says that the span has keys behind the last one.
	More bool
	// Revision is the revision of the keys.
	Revision keyspace.Revision
}

// bytes is about the memory that the page takes.
func (p *Page) bytes() int {
	n := 0
	for i := range p.Keys {
		n += len(p.Keys[i].Key) + len(p.Keys[i].Value) + 64
	}
	return n
}

// requestTimeout bounds one request: clientv3 asks again for ever where nobody answers.
const requestTimeout = 30 * time.Second

// Endpoint reads a side with a client of etcd's API.
type Endpoint struct{ c *clientv3.Client }

// NewEndpoint returns the Reader of a client. The client stays its owner's.
func NewEndpoint(c *clientv3.Client) *Endpoint { return &Endpoint{c} }

var _ Reader = (*Endpoint)(nil)

// span returns the first key and the options of a request for [from, end).
func span(from, end []byte, revision keyspace.Revision) (string, []clientv3.OpOption) {
	if len(from) == 0 {
		from = []byte{0}
	}
	opts := []clientv3.OpOption{clientv3.WithFromKey()}
	if len(end) > 0 {
		opts = []clientv3.OpOption{clientv3.WithRange(string(end))}
	}
	if revision > 0 {
		opts = append(opts, clientv3.WithRev(int64(revision)))
	}
	return string(from), opts
}

// Page implements Reader. It asks for fewer keys if the answer would be larger than
// MaxMessageBytes.
func (e *Endpoint) Page(ctx context.Context, from, end []byte, revision keyspace.Revision, limit int) (Page, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	key, opts := span(from, end, revision)
	for {
		r, err := e.c.Get(ctx, key, append(opts, clientv3.WithLimit(int64(limit)))...)
		if tooLarge(err) && limit > 1 {
			limit /= 2
			continue
		}
		if err != nil {
			return Page{}, failed(fmt.Sprintf("read the keys from %q", key), revision, err)
		}
		p := Page{More: r.More, Revision: revision, Keys: make([]mvcc.Version, len(r.Kvs))}
		if revision == 0 {
			p.Revision = keyspace.Revision(r.Header.Revision)
		}
		for i, kv := range r.Kvs {
			p.Keys[i] = version(kv)
		}
		return p, nil
	}
}

// version is a key as etcd's API shows it.
func version(kv *mvccpb.KeyValue) mvcc.Version {
	return mvcc.Version{
		Key: kv.Key, Value: kv.Value, Version: kv.Version, Lease: keyspace.LeaseID(kv.Lease),
		Mod: keyspace.Revision(kv.ModRevision), Create: keyspace.Revision(kv.CreateRevision),
	}
}

// tooLarge says that the client refused an answer for its size.
func tooLarge(err error) bool {
	return status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "larger than max")
}

// failed gives an error of a side its operation. A compacted revision becomes ErrCompacted.
func failed(what string, revision keyspace.Revision, err error) error {
	if errors.Is(err, rpctypes.ErrCompacted) {
		return fmt.Errorf("%s at revision %d: %w", what, revision, ErrCompacted)
	}
	return fmt.Errorf("%s at revision %d: %w", what, revision, err)
}

// Count implements Reader.
func (e *Endpoint) Count(ctx context.Context, from, end []byte, revision keyspace.Revision) (int64, keyspace.Revision, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	key, opts := span(from, end, revision)
	r, err := e.c.Get(ctx, key, append(opts, clientv3.WithCountOnly())...)
	if err != nil {
		return 0, 0, failed("count the keys", revision, err)
	}
	if revision == 0 {
		revision = keyspace.Revision(r.Header.Revision)
	}
	return r.Count, revision, nil
}

// Written implements Reader. Where a side takes smaller transactions, it makes some.
func (e *Endpoint) Written(ctx context.Context, keys [][]byte) ([]keyspace.Revision, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	gets := make([]clientv3.Op, len(keys))
	for i, k := range keys {
		gets[i] = clientv3.OpGet(string(k), clientv3.WithKeysOnly())
	}
	r, err := e.c.Txn(ctx).Then(gets...).Commit()
	if half := len(keys) / 2; errors.Is(err, rpctypes.ErrTooManyOps) && half > 0 {
		a, err := e.Written(ctx, keys[:half])
		if err != nil {
			return nil, err
		}
		b, err := e.Written(ctx, keys[half:])
		return append(a, b...), err
	}
	if err == nil && len(r.Responses) != len(keys) {
		err = fmt.Errorf("%d answers", len(r.Responses))
	}
	if err != nil {
		return nil, fmt.Errorf("look up %d keys: %w", len(keys), err)
	}
	written := make([]keyspace.Revision, len(keys))
	for i := range r.Responses {
		if kvs := r.Responses[i].GetResponseRange().GetKvs(); len(kvs) == 1 {
			written[i] = keyspace.Revision(kvs[0].ModRevision)
		}
	}
	return written, nil
}

// Leases implements Reader.
func (e *Endpoint) Leases(ctx context.Context) ([]keyspace.LeaseID, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	r, err := e.c.Leases(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the leases: %w", err)
	}
	ids := make([]keyspace.LeaseID, len(r.Leases))
	for i, l := range r.Leases {
		ids[i] = keyspace.LeaseID(l.ID)
	}
	return ids, nil
}

// TTL implements Reader.
func (e *Endpoint) TTL(ctx context.Context, id keyspace.LeaseID) (seconds int64, exists bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	r, err := e.c.TimeToLive(ctx, clientv3.LeaseID(id))
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		return 0, false, nil
	case err != nil:
		return 0, false, fmt.Errorf("look up lease %x: %w", int64(id), err)
	case r.TTL < 0:
		return 0, false, nil // etcd's way to say that there is no such lease
	}
	return r.GrantedTTL, true, nil
}

// A Cursor goes through a side by pages. One goroutine uses it.
type Cursor struct {
	side      Reader
	next, end []byte
	revision  keyspace.Revision
	limit     int
	page      Page
	at        int
	begun     bool
	// beside is a Cursor over the same keys of another side, or nil. A page ends where the page of that one ends: an etcd
	// counts all keys of the span that it is asked for, whatever the limit. asked is the end of the page.
	beside *Cursor
	asked  []byte
}

// firstLimit is the number of keys in the first page, whose sizes are not known.
const firstLimit = 64

// NewCursor returns a Cursor over [from, end) at a revision. Revision 0 is that of the
// first page.
func NewCursor(side Reader, from, end []byte, revision keyspace.Revision) *Cursor {
	return &Cursor{side: side, next: from, end: end, revision: revision, limit: firstLimit}
}

// Expect says about how many keys there are, if it is known that they fit in a page. It comes first.
func (c *Cursor) Expect(keys int) { c.limit = max(1, min(PageKeys, keys)) }

// Revision is the revision that the Cursor reads at, 0 before the first page.
func (c *Cursor) Revision() keyspace.Revision { return c.revision }

// Key returns the key at the Cursor, or nil behind the last one.
func (c *Cursor) Key(ctx context.Context) (*mvcc.Version, error) {
	for c.at == len(c.page.Keys) {
		if c.begun && !c.page.More {
			if bytes.Equal(c.asked, c.end) {
				return nil, nil
			}
			c.next = c.asked
		}
		c.asked = c.pageEnd()
		p, err := c.side.Page(ctx, c.next, c.asked, c.revision, c.limit)
		if err != nil {
			return nil, err
		}
		if p.More && len(p.Keys) == 0 {
			return nil, fmt.Errorf("read the keys from %q: the page is empty and says that there are more", c.next)
		}
		c.begun, c.page, c.at, c.revision = true, p, 0, p.Revision
		if n := len(p.Keys); n > 0 {
			c.next = append(append([]byte{}, p.Keys[n-1].Key...), 0)
			c.limit = max(1, min(PageKeys, 2*c.limit, pageBytes/(p.bytes()/n+1)))
		}
	}
	return &c.page.Keys[c.at], nil
}

// pageEnd is where the next page ends at the latest.
func (c *Cursor) pageEnd() []byte {
	if b := c.beside; b != nil && b.page.More && bytes.Compare(b.next, c.next) > 0 {
		return b.next
	}
	return c.end
}

// Advance goes to the next key.
func (c *Cursor) Advance() { c.at++ }
