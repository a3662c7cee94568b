package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var (
	// ErrUnknownFate says that a change was sent and no answer came: it has happened, will happen, or never does.
	ErrUnknownFate = errors.New("client: no answer came, and the change may have happened")
	// ErrClosed says that the client was closed.
	ErrClosed = errors.New("client: the client is closed")
	// ErrNoPipe says that the endpoint serves no pipe: it is an etcd, or an older Skein.
	ErrNoPipe = errors.New("client: the endpoint serves no pipe")
)

// Config says which cluster a client uses, and how.
type Config struct {
	// Etcd has endpoints, user and certificates, as for etcd's own client. Where it has no DialKeepAliveTime, a connection on
	// which nothing comes is tested every 10 s, and given up 5 s later. With an AutoSyncInterval, EndpointsOnly is set: etcd's client
	// has a data race where it dials a leader while it takes in other endpoints.
	Etcd clientv3.Config
	// PageKeys is how many keys Range reads at a time. 0 means 1,000.
	PageKeys int64
	// EndpointsOnly keeps the client to the endpoints of Etcd. Without it, it sends operations to the nodes that lead the ranges
	// of their keys, where it can reach these at their advertised client URLs. It must be set for who calls Sync or SetEndpoints of
	// [Client.Etcd], for the same race.
	EndpointsOnly bool
}

// Client is a client of one cluster. Its methods may be called from many goroutines.
type Client struct {
	etcd     *clientv3.Client
	pageKeys int64
	// follows says which URLs of nodes the client may use. Nil are none.
	follows func(url string) bool
	ctx     context.Context
	cancel  context.CancelFunc
	done    chan struct{} // closed when the client's goroutine has ended
	tags    atomic.Uint64

	// workers are the goroutines that receive, and those of leaders. They are begun under mu, while closed is false.
	workers sync.WaitGroup

	mu sync.Mutex
	// Guarded by mu. any leads to any endpoint, and takes whatever has no better way.
	any lane
	// places say who leads what, and leaders are the nodes in them.
	places  places
	leaders map[uint64]*leader
	// anyNode is the node at the other end of any, 0 if it is not known. last is why no pipe was opened last.
	anyNode uint64
	last    error
	closed  bool
}

// Open opens a client, and returns once a node serves it. It is closed by Close.
func Open(ctx context.Context, cfg Config) (*Client, error) {
	if cfg.PageKeys <= 0 {
		cfg.PageKeys = 1000
	}
	if cfg.Etcd.DialKeepAliveTime == 0 {
		// Without it a node that vanishes, rather than ends, keeps calls waiting until TCP gives up.
		cfg.Etcd.DialKeepAliveTime = 10 * time.Second
		cfg.Etcd.DialKeepAliveTimeout = cmp.Or(cfg.Etcd.DialKeepAliveTimeout, 5*time.Second)
	}
	cfg.EndpointsOnly = cfg.EndpointsOnly || cfg.Etcd.AutoSyncInterval > 0
	etcd, err := login(ctx, cfg.Etcd)
	if err != nil {
		return nil, fmt.Errorf("client: log in at %v: %w", cfg.Etcd.Endpoints, err)
	}
	c := newClient(etcd)
	c.pageKeys = cfg.PageKeys
	if !cfg.EndpointsOnly {
		c.follows = follower(&cfg.Etcd)
	}
	c.ctx, c.cancel = context.WithCancel(etcd.Ctx())
	first := make(chan error, 1)
	go c.run(first)
	select {
	case err = <-first:
	case <-c.done:
		err = errors.Join(ErrClosed, c.ctx.Err()) // by the context of cfg.Etcd
	case <-ctx.Done():
		err = errors.Join(ctx.Err(), c.lastError())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("client: open a pipe to %v: %w", etcd.Endpoints(), err), c.Close())
	}
	return c, nil
}

// login returns etcd's client. New logs in, and tries that once. So login calls it again while the node may be down.
func login(ctx context.Context, cfg clientv3.Config) (*clientv3.Client, error) {
	base := cfg.Context
	if base == nil {
		base = context.Background()
	}
	for pause := leastPause; ; pause = min(2*pause, mostPause) {
		life, cancel := context.WithCancel(base)
		cfg.Context = life
		asked, slow := context.AfterFunc(ctx, cancel), time.AfterFunc(loginTimeout, cancel)
		etcd, err := clientv3.New(cfg)
		bounded := asked() // and not ended by either
		if slow.Stop() && bounded && err == nil {
			context.AfterFunc(etcd.Ctx(), cancel)
			return etcd, nil
		}
		cancel()
		if err == nil {
			_ = etcd.Close() // it has nothing under way
			err = context.Canceled
		}
		switch {
		case base.Err() != nil:
			return nil, errors.Join(base.Err(), err)
		case ctx.Err() == nil && !mayPass(err):
			return nil, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), err)
		}
	}
}

func newClient(etcd *clientv3.Client) *Client {
	c := &Client{etcd: etcd, done: make(chan struct{}), leaders: map[uint64]*leader{}}
	c.any = lane{c: c, wake: make(chan struct{}, 1)}
	return c
}

// Close ends the client and its etcd client. Calls without an answer end with ErrClosed, and changes that were sent with
// ErrUnknownFate too.
func (c *Client) Close() error {
	c.cancel()
	<-c.done
	err := c.etcd.Close()
	if errors.Is(err, context.Canceled) {
		return nil // that is what it always returns
	}
	return err
}

// Etcd returns etcd's client of the same endpoints and user, for all that the pipe does not carry. It ends with c. Its Sync and
// SetEndpoints need [Config].EndpointsOnly.
func (c *Client) Etcd() *clientv3.Client { return c.etcd }

// The pauses between attempts to open a pipe.
const (
	leastPause = 10 * time.Millisecond
	mostPause  = time.Second
)

// run has a pipe open until the client is closed. first gets nil when there is the first one, or why there will be none.
func (c *Client) run(first chan<- error) {
	defer close(c.done)
	pause := leastPause
	for c.ctx.Err() == nil {
		s, err := c.any.open(c.etcd.ActiveConnection())
		if err == nil {
			select {
			case first <- nil:
			default:
			}
			c.setAnyNode(s.window.GetNode())
			if s.serve(nil) {
				pause = leastPause
			}
			c.setAnyNode(0)
		} else if c.notOpened(err) {
			select {
			case first <- c.finally(err):
			default:
			}
		}
		select {
		case <-time.After(pause):
		case <-c.ctx.Done():
		}
		pause = min(2*pause, mostPause)
	}
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.workers.Wait()
	c.failQueue(ErrClosed)
}

func (c *Client) setAnyNode(node uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.anyNode = node
}

// notOpened takes in why no pipe was opened. It says whether another attempt would end alike, and ends all calls then.
// Otherwise it ends those that nobody waits for any more: without a pipe nothing else takes them out of the queue.
func (c *Client) notOpened(err error) (final bool) {
	c.mu.Lock()
	c.last = err
	c.any.queue = slices.DeleteFunc(c.any.queue, func(call *call) bool {
		ended := call.ctx.Err()
		if ended != nil {
			call.end(nil, ended)
		}
		return ended != nil
	})
	c.mu.Unlock()
	why := c.finally(err)
	if why != nil {
		c.failQueue(why)
	}
	return why != nil
}

func (c *Client) lastError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// finally returns what the calls end with where another attempt to open a pipe would end as this one, nil where it may not.
func (c *Client) finally(err error) error {
	switch {
	case codeOf(err) == codes.Unimplemented:
		return fmt.Errorf("%w: %w", ErrNoPipe, err)
	case mayPass(err), c.etcd.Username != "" && isOldToken(err):
		return nil
	}
	return rpctypes.Error(err)
}

// mayPass says whether another attempt to log in, or to open a pipe, may end otherwise.
func mayPass(err error) bool {
	code := codeOf(err)
	return code == codes.Unavailable || code == codes.Canceled || code == codes.ResourceExhausted || code == codes.DeadlineExceeded
}

// codeOf returns the code of an error of a stream that is opened. The login before it has errors of etcd's client and of
// contexts, which have no status.
func codeOf(err error) codes.Code {
	var login rpctypes.EtcdError
	switch {
	case errors.As(err, &login):
		return login.Code()
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return codes.Canceled // by the bound of the opening, or with the client
	}
	return status.Code(err)
}

// isOldToken says whether a new login helps.
func isOldToken(err error) bool {
	e := rpctypes.Error(err)
	return errors.Is(e, rpctypes.ErrInvalidAuthToken) || errors.Is(e, rpctypes.ErrAuthOldRevision)
}
