package lifecycle

import (
	"context"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Unknown has the replica opened if the peer lists it as a member. It does not block.
func (l *Lifecycle) Unknown(u Unknown) {
	l.mu.Lock()
	if len(l.unknown) < l.cfg.MaxUnknown {
		l.unknown = append(l.unknown, u)
	}
	l.mu.Unlock()
	l.ask.Set()
}

// RunOpener opens replicas that peers speak to, until ctx ends.
func (l *Lifecycle) RunOpener(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.ask:
		}
		for u, ok := l.nextUnknown(); ok && ctx.Err() == nil; u, ok = l.nextUnknown() {
			if err := l.open(ctx, u); err != nil && ctx.Err() == nil {
				l.cfg.Logger.Warn("open a replica that a node speaks to", zap.Stringer("group", u.Group), zap.Uint64("replica", uint64(u.To)), zap.Error(err))
			}
		}
	}
}

func (l *Lifecycle) nextUnknown() (u Unknown, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.unknown) == 0 {
		return Unknown{}, false
	}
	u = l.unknown[0]
	l.unknown = slices.Delete(l.unknown, 0, 1)
	return u, true
}

func (l *Lifecycle) open(ctx context.Context, u Unknown) error {
	if left, err := l.cfg.Tombstones.Left(u.Group); err != nil || u.To <= left {
		return err
	}
	if done, err := l.cfg.Owner.OpenStored(ctx, u); done || err != nil {
		return err
	}
	d, err := l.askPeer(ctx, u)
	if err != nil {
		return fmt.Errorf("ask node %s for the descriptor: %w", u.From, err)
	}
	if m, member := d.ReplicaOn(l.cfg.Self); !member || m.ID != u.To {
		return nil
	}
	// While the peer was asked, the replica may have come by itself, and have been removed.
	if l.Removing(u.Group) {
		return nil
	}
	if left, err := l.cfg.Tombstones.Left(u.Group); err != nil || u.To <= left {
		return err
	}
	return l.cfg.Owner.OpenEmpty(ctx, u, &d)
}

// askPeer asks the peer. If it does not answer in time, its other questions are dropped: those to
// other peers must not wait for each of them.
func (l *Lifecycle) askPeer(ctx context.Context, u Unknown) (keyspace.Descriptor, error) {
	ctx, cancel := clock.WithTimeout(ctx, l.cfg.Clock, AskTimeout)
	defer cancel()
	d, err := l.cfg.Owner.Ask(ctx, u)
	if ctx.Err() != nil {
		l.mu.Lock()
		l.unknown = slices.DeleteFunc(l.unknown, func(o Unknown) bool { return o.From == u.From })
		l.mu.Unlock()
	}
	return d, err
}
