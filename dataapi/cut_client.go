package dataapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
)

// Client makes and reads cuts over a connection to any node. It may be used from many goroutines.
type Client struct {
	data  datapb.DataClient
	clock clock.Clock
}

// NewClient returns a client. Whoever made the connection closes it.
func NewClient(conn grpc.ClientConnInterface, c clock.Clock) *Client {
	return &Client{data: datapb.NewDataClient(conn), clock: c}
}

// Cut makes a cut, see Cutter.Cut. The caller holds it with Hold, and releases it.
func (c *Client) Cut(ctx context.Context, o CutOptions) (*Cut, error) {
	st, err := c.data.Cut(ctx, &datapb.CutRequest{Kind: o.Kind, Owner: o.Owner, FromRevision: int64(o.From), Hold: uint64(o.Hold)})
	if err != nil {
		return nil, fmt.Errorf("make a cut: %w", err)
	}
	cut := &Cut{}
	for first := true; ; first = false {
		p, err := st.Recv()
		if errors.Is(err, io.EOF) && !first {
			return cut, nil
		}
		if err != nil {
			return nil, fmt.Errorf("make a cut: %w", err)
		}
		cut.add(p, first)
	}
}

// Renew is Cutter.Renew.
func (c *Client) Renew(ctx context.Context, id fsm.HoldID, revision keyspace.Revision) error {
	if _, err := c.data.Renew(ctx, &datapb.RenewRequest{Hold: uint64(id), Revision: int64(revision)}); err != nil {
		return fmt.Errorf("renew the hold of old versions: %w", err)
	}
	return nil
}

// Release is Cutter.Release.
func (c *Client) Release(ctx context.Context, id fsm.HoldID) error {
	if _, err := c.data.Release(ctx, &datapb.ReleaseRequest{Hold: uint64(id)}); err != nil {
		return fmt.Errorf("release the hold of old versions: %w", err)
	}
	return nil
}

// Hold renews a hold in the background until stop is called. The context that it returns ends with ctx, or once the
// hold has ended or could not be renewed for its whole life; its cause says why.
func (c *Client) Hold(ctx context.Context, id fsm.HoldID) (held context.Context, stop func()) {
	return keepHold(ctx, c.clock, func(ctx context.Context) error { return c.Renew(ctx, id, 0) })
}

// ReleaseSoon ends a hold though its owner may have gone, within seconds. If that fails the hold expires.
func (c *Client) ReleaseSoon(ctx context.Context, id fsm.HoldID) error {
	ctx, cancel := clock.WithTimeout(context.WithoutCancel(ctx), c.clock, releaseTimeout)
	defer cancel()
	return c.Release(ctx, id)
}

// Each calls f with the versions of a cut, see Read.
func (c *Client) Each(ctx context.Context, cut mvcc.Cut, f func(*mvcc.Version) error) error {
	vs := c.Read(ctx, ReadOptions{Cut: cut})
	defer vs.Close()
	for {
		v, err := vs.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = f(v)
		}
		if err != nil {
			return err
		}
	}
}

// ReadOptions say what of a cut is read.
type ReadOptions struct {
	Cut mvcc.Cut
	// Span are the keys.
	Span keyspace.Span
}

// Read returns the versions of a part of a cut. ctx bounds all of it. The caller closes it.
func (c *Client) Read(ctx context.Context, o ReadOptions) *Versions {
	ctx, cancel := context.WithCancel(ctx)
	return &Versions{c: c, o: o, ctx: ctx, cancel: cancel, next: mvcc.VersionCursor{Key: o.Span.Start}}
}

// Versions are versions in the order of keys, those of a key newest first. One goroutine uses them.
type Versions struct {
	c      *Client
	o      ReadOptions
	ctx    context.Context
	cancel context.CancelFunc
	st     datapb.Data_ReadClient
	decode block.Decoder
	sum    block.Sum

	ready []mvcc.Version
	// next is where a stream begins that goes on behind what is in ready and what was returned.
	next mvcc.VersionCursor
	// failures counts the streams that ended before they brought anything.
	failures    int
	began, done bool
}

// maxReadFailures bounds how often a stream is opened again in vain, with pauses of up to readPauseLast between.
const (
	maxReadFailures = 20
	readPauseFirst  = 50 * time.Millisecond
	readPauseLast   = 2 * time.Second
)

// Next returns the next version, valid until the next call; io.EOF is the end. A stream that fails for a moment is
// opened again, behind what was received.
func (v *Versions) Next() (*mvcc.Version, error) {
	if len(v.ready) == 0 {
		if _, err := v.fill(); err != nil {
			return nil, err
		}
	}
	one := &v.ready[0]
	v.ready = v.ready[1:]
	v.sum.Add(one)
	return one, nil
}

// NextBlock returns the next versions together with the block in which the node has sent them, for those who keep it as
// it is. Both are valid until the next call. It does as Next does, and is not mixed with it.
func (v *Versions) NextBlock() (b []byte, vs []mvcc.Version, err error) {
	if b, err = v.fill(); err != nil {
		return nil, nil, err
	}
	vs, v.ready = v.ready, nil
	for i := range vs {
		v.sum.Add(&vs[i])
	}
	return b, vs, nil
}

// fill brings the versions of the next block.
func (v *Versions) fill() (b []byte, err error) {
	for v.ready = nil; len(v.ready) == 0; {
		if v.done {
			return nil, io.EOF
		}
		if b, err = v.receive(); err == nil {
			v.failures = 0
			continue
		}
		if errors.Is(err, io.EOF) {
			v.done = true
			continue
		}
		v.st = nil
		if v.failures++; v.ctx.Err() != nil || v.failures > maxReadFailures || !passes(err) {
			if cause := context.Cause(v.ctx); cause != nil {
				err = cause
			}
			return nil, fmt.Errorf("read %s at revision %d from %q on: %w", v.o.Cut.Select, v.o.Cut.At, v.next.Key, err)
		}
		pause := min(readPauseFirst<<min(v.failures, 10), readPauseLast)
		if clock.Sleep(v.ctx, v.c.clock, pause) != nil {
			return nil, fmt.Errorf("read %s at revision %d: %w", v.o.Cut.Select, v.o.Cut.At, context.Cause(v.ctx))
		}
	}
	return b, nil
}

// passes says whether an error may pass by itself.
func passes(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.ResourceExhausted, codes.Aborted, codes.Internal:
		return true
	default:
		return false
	}
}

// receive takes the next message, and returns its block.
func (v *Versions) receive() (b []byte, err error) {
	if v.st == nil {
		if end := v.o.Span.End; v.began && len(end) > 0 && string(v.next.Key) >= string(end) {
			return nil, io.EOF // only the end of the stream was missing
		}
		q := &datapb.ReadRequest{
			Select: datapb.Select(v.o.Cut.Select), Revision: int64(v.o.Cut.At), AfterRevision: int64(v.o.Cut.After),
			Start: v.next.Key, Below: int64(v.next.Below), End: v.o.Span.End,
		}
		if v.st, err = v.c.data.Read(v.ctx, q); err != nil {
			return nil, err
		}
		v.began = true
	}
	m, err := v.st.Recv()
	if err != nil {
		return nil, err
	}
	if len(m.GetBlock()) > 0 {
		if v.ready, err = v.decode.Decode(m.GetBlock()); err != nil {
			return nil, err
		}
		if n := len(v.ready); n > 0 {
			v.next = v.o.Cut.Behind(v.ready[n-1].Key, v.ready[n-1].Mod)
		}
	}
	if len(m.GetNextStart()) > 0 {
		v.next = mvcc.VersionCursor{Key: m.GetNextStart(), Below: keyspace.Revision(m.GetNextBelow())}
	}
	return m.GetBlock(), nil
}

// Sum describes the versions that Next has returned.
func (v *Versions) Sum() block.Sum { return v.sum }

// Close ends the stream.
func (v *Versions) Close() { v.cancel() }
