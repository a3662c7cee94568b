package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// attachOptions are the command line of the measure.
type attachOptions struct {
	pairs, leases, clients, value int
	settle                        time.Duration
}

func attachFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o attachOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.IntVar(&o.leases, "leases", 5000, "new leases of a run, with a new key each")
	set.IntVar(&o.clients, "clients", 64, "clients, with a connection each")
	set.IntVar(&o.value, "value-size", 256, "bytes of a value")
	set.DurationVar(&o.settle, "settle", 110*time.Second,
		"unmeasured puts of 16 clients at each side at the beginning: by then Skein's placement has followed them")
	return func(ctx context.Context, b *bench) error {
		if o.pairs < 1 || o.leases < 1 || o.clients < 1 || o.value < 1 || o.settle <= 0 {
			return errors.New("attach: at least one of each, and a time of unmeasured puts")
		}
		return attach(ctx, b, &o)
	}
}

const attachPrefix = "attach/"

// The kinds of calls.
const (
	attachGrant = "grant"
	attachPut   = "first put with a lease"
	attachKeep  = "keepalive once"
	attachEnd   = "revoke"
)

// attach measures what services do that register themselves: a lease, a key with it, and a keepalive.
func attach(ctx context.Context, b *bench, o *attachOptions) error {
	splits, err := b.splitFile(spanKeys(attachPrefix))
	if err != nil {
		return err
	}
	flags := strings.Fields(b.skeinFlags)
	one, apart := b.cluster(rowSides[1], skeinBinary, 100, etcdArgs(flags...)),
		b.cluster(rowSides[2], skeinBinary, 200, etcdArgs(append(flags, "--initial-split-keys", splits)...))
	clusters := []*cluster{b.etcd(), one, apart}
	var runs map[string][]figureSet
	err = b.with(ctx, clusters, func() error {
		if err := apart.created(ctx, len(spans)); err != nil {
			return err
		}
		sides := map[string]func(pair int) (figureSet, error){}
		for _, c := range clusters {
			clients, done, err := c.connectSome(o.clients)
			if err != nil {
				return err
			}
			defer done()
			progress("%s gets used to the load", c.name)
			if err := o.prepare(ctx, c); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			sides[c.name] = func(pair int) (figureSet, error) { return o.run(ctx, c, clients, pair+1) }
			// The first run is not counted.
			if _, err := sides[c.name](-1); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
		runs, err = paired(o.pairs, rowSides, func(side string, pair int) (figureSet, error) { return sides[side](pair) })
		return err
	})
	if err != nil {
		return err
	}
	var names []string
	for _, kind := range []string{attachGrant, attachPut, attachKeep, attachEnd} {
		names = append(names, callNames(kind)...)
	}
	writeSides(os.Stdout, fmt.Sprintf("%d leases, %d clients", o.leases, o.clients), rowSides, runs, names)
	return b.save("attach.json", runs)
}

// prepare puts keys of all ranges, without leases.
func (o *attachOptions) prepare(ctx context.Context, c *cluster) error {
	p := pace{endpoints: c.endpoints(), conns: 16, clients: 16, value: o.value}
	for i := range 1000 {
		p.keys = append(p.keys, []byte(spanKey(attachPrefix, i)))
	}
	p.pick = evenlyOf(len(p.keys))
	if _, err := p.most(ctx, 0, o.settle); err != nil {
		return err
	}
	return c.settled(ctx)
}

// run measures each kind of call for so many leases. A lease is always used by the client that was granted it.
func (o *attachOptions) run(ctx context.Context, c *cluster, clients []*clientv3.Client, run int) (figureSet, error) {
	const seconds = 3600
	value, ids, f := strings.Repeat("v", o.value), make([]clientv3.LeaseID, o.leases), figureSet{}
	for _, kind := range []struct {
		name string
		do   func(ctx context.Context, client *clientv3.Client, i int) error
	}{
		{attachGrant, func(ctx context.Context, client *clientv3.Client, i int) error {
			got, err := client.Grant(ctx, seconds)
			if err == nil {
				ids[i] = got.ID
			}
			return err
		}},
		{attachPut, func(ctx context.Context, client *clientv3.Client, i int) error {
			// Behind the keys of the run before, and those of prepare.
			_, err := client.Put(ctx, spanKey(attachPrefix, i+o.leases*run)+"/lease", value, clientv3.WithLease(ids[i]))
			return err
		}},
		{attachKeep, func(ctx context.Context, client *clientv3.Client, i int) error {
			_, err := client.KeepAliveOnce(ctx, ids[i])
			return err
		}},
		{attachEnd, func(ctx context.Context, client *clientv3.Client, i int) error {
			_, err := client.Revoke(ctx, ids[i])
			return err
		}},
	} {
		r, err := c.calls(ctx, o.leases, o.clients, func(ctx context.Context, i int) error { return kind.do(ctx, clients[i%len(clients)], i) })
		if err != nil {
			return nil, fmt.Errorf("%s: %w", kind.name, err)
		}
		r.into(f, kind.name)
	}
	return f, c.settled(ctx)
}
