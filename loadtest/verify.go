package loadtest

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/clock"
)

const (
	// verifyPageBytes is the approximate size of one read of the verification.
	verifyPageBytes = 1 << 20
	// maxVerifyPage is the most keys that one read of the verification asks for.
	maxVerifyPage = 1000
	// verifyAttempts and verifyPause bound the retries of a read: after the load the
	// servers may be in an election.
	verifyAttempts = 20
	verifyPause    = 500 * time.Millisecond
)

// verifier reads all keys of a run back in order and compares them with the ledger.
// Pages go to the connections by turns.
type verifier struct {
	cfg    *Config
	kvs    []kv
	space  *keySpace
	ledger *ledger

	next uint64 // the number of the next key to be judged
	key  []byte // that key
	seen map[int64]uint64
	out  Verified
}

// verify checks every key. Its error says that the keys could not be read.
func verify(ctx context.Context, cfg *Config, kvs []kv, space *keySpace, l *ledger) (*Verified, error) {
	v := &verifier{cfg: cfg, kvs: kvs, space: space, ledger: l, seen: map[int64]uint64{}}
	v.out.Unknown = l.unknowns.Load()
	if v.out.Unknown > maxUnknown {
		return nil, fmt.Errorf("verify: %d puts of unknown fate are more than the %d that can be remembered", v.out.Unknown, maxUnknown)
	}
	limit := int64(min(max(verifyPageBytes/(cfg.KeyBytes+cfg.ValueBytes), 16), maxVerifyPage))
	v.key = space.appendKey(nil, 0)
	request := &etcdserverpb.RangeRequest{
		Key:      bytes.Clone(v.key),
		RangeEnd: space.end(),
		Limit:    limit,
	}
	for page := 0; ; page++ {
		answer, err := v.page(ctx, page, request)
		if err != nil {
			return nil, fmt.Errorf("verify: read from key %d: %w", v.next, err)
		}
		for _, kv := range answer.GetKvs() {
			v.judge(kv)
		}
		n := len(answer.GetKvs())
		if !answer.GetMore() {
			break
		}
		if n == 0 {
			return nil, fmt.Errorf("verify: read from key %d: no key came, and more are said to follow", v.next)
		}
		request.Key = append(bytes.Clone(answer.Kvs[n-1].Key), 0)
	}
	for v.next < space.count {
		v.pass(nil)
	}
	v.out.Violations, v.out.First = l.violations()
	return &v.out, nil
}

// judge compares a stored key with the ledger, after the absent keys before it. It
// skips a key of another writer.
func (v *verifier) judge(kv *mvccpb.KeyValue) {
	for v.next < v.space.count {
		switch order := bytes.Compare(v.key, kv.Key); {
		case order > 0:
			return
		case order == 0:
			v.pass(kv)
			return
		}
		v.pass(nil)
	}
}

// pass judges the next key; kv is nil if it is absent.
func (v *verifier) pass(kv *mvccpb.KeyValue) {
	v.out.Keys++
	if v.ledger.final(v.next, kv) {
		v.out.Acknowledged++
	}
	if kv != nil {
		if _, ours, _ := v.ledger.values.recognise(kv.Value); ours {
			if other, taken := v.seen[kv.ModRevision]; taken {
				v.ledger.violation("keys %d and %d were both put at revision %d", other, v.next, kv.ModRevision)
			}
			v.seen[kv.ModRevision] = v.next
		}
	}
	v.next++
	if v.next < v.space.count {
		v.key = v.space.appendKey(v.key[:0], v.next)
	}
}

// page reads one page, from another connection at each attempt.
func (v *verifier) page(ctx context.Context, page int, r *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	var last error
	for attempt := range verifyAttempts {
		if attempt > 0 {
			if err := clock.Sleep(ctx, v.cfg.Clock, verifyPause); err != nil {
				return nil, err
			}
		}
		answer, err := func() (*etcdserverpb.RangeResponse, error) {
			ctx, cancel := context.WithTimeout(ctx, v.cfg.Timeout)
			defer cancel()
			return v.kvs[(page+attempt)%len(v.kvs)].Range(ctx, r)
		}()
		if err == nil {
			return answer, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		last = err
	}
	return nil, last
}
