package auth

import (
	"context"
	"encoding/base64"
	"fmt"
	"sync/atomic"

	"golang.org/x/crypto/bcrypt"

	"github.com/skeindb/skein/internal/background"
	"github.com/skeindb/skein/kverror"
)

const (
	// MinCost is the least cost of a hash.
	MinCost = bcrypt.MinCost
	// MaxCost is the highest one. Each step doubles the time: cost 14 takes about a second, and cost 31 a
	// day.
	MaxCost = 14
	// atATime bounds the computations of bcrypt of a node, and maxQueued those that wait.
	atATime, maxQueued = 2, 64
	// bcryptBytes is the length of a hash.
	bcryptBytes = 60
)

// ErrPasswordTooLong is etcd's error for a password of more than 72 bytes.
var ErrPasswordTooLong = bcrypt.ErrPasswordTooLong

// Passwords computes with bcrypt, a few at a time and on threads of low priority, so that logins do not
// take the processors from requests.
type Passwords struct {
	cost  int
	dummy []byte
	inUse atomic.Int32
	turns chan struct{}

	// bcrypt's functions, which tests count.
	hash    func(password []byte, cost int) ([]byte, error)
	matches func(hash, password []byte) error
}

// NewPasswords returns passwords whose new hashes have a cost.
func NewPasswords(cost int) (*Passwords, error) {
	if cost < MinCost || cost > MaxCost {
		return nil, fmt.Errorf("auth: a bcrypt cost of %d, it is %d to %d", cost, MinCost, MaxCost)
	}
	dummy, err := bcrypt.GenerateFromPassword(nil, cost)
	if err != nil {
		return nil, fmt.Errorf("auth: bcrypt with cost %d: %w", cost, err)
	}
	return &Passwords{
		cost: cost, dummy: dummy, turns: make(chan struct{}, atATime),
		hash: bcrypt.GenerateFromPassword, matches: bcrypt.CompareHashAndPassword,
	}, nil
}

// Hash returns the hash of a new password.
func (p *Passwords) Hash(ctx context.Context, password string) (hash []byte, err error) {
	if e := p.inTurn(ctx, func() error {
		background.Run(func() { hash, err = p.hash([]byte(password), p.cost) })
		return err
	}); e != nil {
		return nil, e
	}
	return hash, nil
}

// ClientHash reads a hash that a client has computed, in etcd's form: base64. A login computes with the
// cost that the hash says, so that is bounded.
func ClientHash(text string) ([]byte, error) {
	hash, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, kverror.New(kverror.BadRequest, "the hash of the password is not base64")
	}
	cost, err := bcrypt.Cost(hash)
	if err != nil || len(hash) != bcryptBytes {
		return nil, kverror.New(kverror.BadRequest, "the hash of the password is not bcrypt's: it has %d bytes, not %d", len(hash), bcryptBytes)
	}
	if cost > MaxCost {
		return nil, kverror.New(kverror.BadRequest, "the hash of the password has the cost %d, at most %d", cost, MaxCost)
	}
	return hash, nil
}

// compare returns AuthFailed where the hash is not the password's, or is none. Both cost the
// same, so that the time until the answer does not tell which users there are. ready is asked when it is the caller's turn.
// failed is called before the next caller has its turn. So ready knows of every failure before it.
func (p *Passwords) compare(ctx context.Context, hash []byte, password string, ready func() error, failed func()) error {
	cost, err := bcrypt.Cost(hash)
	usable := err == nil && cost <= MaxCost
	if !usable {
		hash = p.dummy
	}
	return p.inTurn(ctx, func() error {
		if err := ready(); err != nil {
			return err
		}
		var err error
		background.Run(func() { err = p.matches(hash, []byte(password)) })
		if err != nil || !usable {
			failed()
			return kverror.AuthFailed
		}
		return nil
	})
}

// inTurn runs f when less than two others run.
func (p *Passwords) inTurn(ctx context.Context, f func() error) error {
	defer p.inUse.Add(-1)
	if p.inUse.Add(1) > atATime+maxQueued {
		return kverror.New(kverror.TooManyRequests, "%d logins and new passwords wait", maxQueued)
	}
	select {
	case p.turns <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-p.turns }()
	return f()
}
