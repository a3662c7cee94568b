package follow

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror"
)

// TestUsers: a source that checks users is read and watched as root, and nobody else follows it.
func TestUsers(t *testing.T) {
	_, endpoints := startEtcds(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	admin, err := clientv3.New(clientConfig(endpoints))
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	put, err := admin.Put(ctx, "a", "1")
	if err != nil {
		t.Fatal(err)
	}
	_, err = admin.UserAdd(ctx, "root", "p")
	if err == nil {
		_, err = admin.UserGrantRole(ctx, "root", "root")
	}
	if err == nil {
		_, err = admin.UserAdd(ctx, "guest", "p")
	}
	if err == nil {
		_, err = admin.AuthEnable(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	open := func(user string) *mirror.Etcd {
		cfg := clientConfig(endpoints)
		cfg.Username, cfg.Password = user, "p"
		e, err := mirror.NewEtcd(cfg, clock.System())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		return e
	}
	root, guest := open("root"), open("guest")
	if _, rev, err := root.Now(ctx); err != nil || rev != keyspace.Revision(put.Header.Revision) {
		t.Errorf("revision %d, not %d: %v", rev, put.Header.Revision, err)
	}
	// A member that lags does not know the token yet that another one has given out. The mirror opens the watch again then.
	watch := func(ctx context.Context, e *mirror.Etcd, parts chan mirror.Part) (err error) {
		for ctx.Err() == nil {
			if err = e.Watch(ctx, keyspace.Revision(put.Header.Revision), parts); !errors.Is(err, rpctypes.ErrInvalidAuthToken) {
				return err
			}
		}
		return ctx.Err()
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	parts, ended := make(chan mirror.Part, 10), make(chan error, 1)
	go func() { ended <- watch(watching, root, parts) }()
	for {
		select {
		case p := <-parts:
			if len(p.Events) == 0 {
				continue
			}
			if string(p.Events[0].Key) != "a" {
				t.Errorf("%+v", p.Events)
			}
		case err := <-ended:
			t.Fatal(err)
		}
		break
	}
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := watch(ctx, guest, make(chan mirror.Part, 10)); !errors.Is(err, rpctypes.ErrPermissionDenied) {
		t.Errorf("a guest watches all keys: %v", err)
	}
}
