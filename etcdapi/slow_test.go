package etcdapi

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/rangeapi/stages"
)

// slowList is what a server tells of slow requests.
type slowList struct {
	mu  sync.Mutex
	all []stages.Slow
}

func (l *slowList) add(s stages.Slow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, s)
}

func (l *slowList) take() []stages.Slow {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.all
	l.all = nil
	return all
}

// blocked notes in a request what a leader tells that has kept it behind a lock, and keeps it for a while. The
// leader tells of an hour. Were the sleep longer than that, the gateway itself would be the cause.
func blocked(ctx context.Context) error {
	time.Sleep(stages.Threshold + 10*time.Millisecond)
	r := &stages.Record{Range: 12, Node: 0xb, Lock: "5.c.2.3/1", Took: time.Hour}
	r.Spent[stages.Blocked] = r.Took
	stages.Of(ctx).Note(r)
	return nil
}

// A slow request is told once to the log and once to the list, with its cause, range and sizes, and without its key and
// value. A fast one is told to nobody.
func TestASlowRequestIsTold(t *testing.T) {
	lines, logs := observer.New(zap.InfoLevel)
	var list slowList
	r := newRig(t, "http", func(o *Options) {
		o.Logger, o.WarnUnaryRequest, o.Slow = zap.New(lines), stages.Threshold, list.add
		o.Names = func(s string) string { return strings.ReplaceAll(s, "5.c.", "5.n2 (c).") }
	})
	r.kv.hook = blocked
	c := r.client(t, clientv3.Config{})
	const key, value = "a-key-nobody-reads", "a-value-nobody-reads"
	if _, err := c.Put(t.Context(), key, value); err != nil {
		t.Fatal(err)
	}
	const cause = "waited 3600000 ms for the lock of transaction 5.n2 (c).2.3/1 in range 12"
	got := list.take()
	if len(got) != 1 || got[0].Cause != cause || got[0].Range != 12 || got[0].Method != "/etcdserverpb.KV/Put" ||
		got[0].Took <= stages.Threshold || got[0].RequestBytes < len(key)+len(value) || got[0].ResponseBytes == 0 || got[0].Unix == 0 {
		t.Errorf("%+v", got)
	}
	told := logs.FilterMessage("request took long").All()
	if len(told) != 1 || told[0].ContextMap()["cause"] != cause || told[0].ContextMap()["range"] != "12" || told[0].Level != zap.WarnLevel {
		t.Fatalf("%v", told)
	}
	text, err := json.Marshal(got)
	if text = fmt.Append(text, told[0].ContextMap()); err != nil || strings.Contains(string(text), "nobody-reads") {
		t.Errorf("%s, %v", text, err)
	}
}

// A second has so many lines; the next one says how many were left out.
func TestSlowLinesAreBounded(t *testing.T) {
	var l stages.Limit
	at := clock.Time(5 * time.Second)
	written := 0
	for i := range 3 * slowLinesPerSecond {
		if ok, left := l.Take(at.Add(time.Duration(i)*time.Millisecond), slowLinesPerSecond); ok {
			if written++; left != 0 {
				t.Errorf("%d were left out", left)
			}
		}
	}
	ok, left := l.Take(at.Add(time.Second), slowLinesPerSecond)
	if written != slowLinesPerSecond || !ok || left != 2*slowLinesPerSecond {
		t.Errorf("%d lines; then %t, and %d were left out", written, ok, left)
	}
	if ok, left := l.Take(at.Add(time.Second), slowLinesPerSecond); !ok || left != 0 {
		t.Errorf("then %t, and %d were left out", ok, left)
	}
}

// Where all calls are slow, so many go to the list in a second. What takes long by design does not.
func TestSlowCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var list slowList
		named := 0
		s := &Server{log: zap.NewNop(), metrics: NewMetrics(nil), opts: Options{
			Clock: clock.Virtual(), WarnUnaryRequest: time.Hour, Slow: list.add,
			Names: func(s string) string { named++; return s },
		}}
		for second := range 3 {
			for _, method := range []string{
				"/v3lockpb.Lock/Lock", "/v3electionpb.Election/Campaign", "/etcdserverpb.Auth/Authenticate", "/skein.admin.v1.Admin/Status",
			} {
				s.tellSlow(t.Context(), &ended{method: method, took: time.Second})
			}
			if all := list.take(); len(all) > 0 {
				t.Errorf("slow by design: %v", all)
			}
			for range 3 * stages.PerSecond {
				s.tellSlow(t.Context(), &ended{method: "/etcdserverpb.KV/Put", took: time.Second})
			}
			if n := len(list.take()); n != stages.PerSecond || named != stages.PerSecond {
				t.Errorf("second %d: %d are on the list, %d were made", second, n, named)
			}
			named = 0
			time.Sleep(time.Second)
		}
	})
}

// Each request has a record of its own: nothing of one is told of another.
func TestEachRequestHasItsOwnCall(t *testing.T) {
	r := newRig(t, "http", nil)
	seen := map[*stages.Call]bool{}
	var mu sync.Mutex
	r.kv.hook = func(ctx context.Context) error {
		mu.Lock()
		defer mu.Unlock()
		seen[stages.Of(ctx)] = true
		return nil
	}
	kv := pb.NewKVClient(r.client(t, clientv3.Config{}).ActiveConnection())
	for range 3 {
		if _, err := kv.Put(t.Context(), &pb.PutRequest{Key: []byte("k")}); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(seen) != 3 || seen[nil] {
		t.Errorf("three puts had %d calls, %v", len(seen), seen)
	}
}
