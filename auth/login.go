package auth

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

const (
	// freeFailures is how many logins in a row may fail before the next must wait.
	freeFailures = 4
	// The delay after the next failure, and after many.
	firstDelay, maxDelay = time.Second, 30 * time.Second
	// failuresKept is how long a failure counts, and maxFailures for how many pairs of user and address.
	failuresKept = 10 * time.Minute
	maxFailures  = 65536
)

// failures are those in a row of one user from one address.
type failures struct {
	count int
	until clock.Time // when the next login may begin
}

// Logins compares the passwords of users who log in at one node.
type Logins struct {
	clk       clock.Clock
	passwords *Passwords
	read      func(ctx context.Context, user string) (rights.Credential, error)
	failed    *recent[failures]
}

// NewLogins returns the logins of a node. read reads the credential of a user linearizably.
func NewLogins(clk clock.Clock, p *Passwords, read func(ctx context.Context, user string) (rights.Credential, error)) *Logins {
	return &Logins{clk: clk, passwords: p, read: read, failed: newRecent[failures](failuresKept, maxFailures)}
}

// Login returns the proof that somebody at an address is a user, whose password was given. The password
// may change while it is compared. So the credential is read again afterwards, and compared again where
// it is another one.
//
// After several failures of the same user and address the next login is refused for a while. It is not
// held back instead: those who wait would take the places in the queue from all others.
func (l *Logins) Login(ctx context.Context, address, user, password string) (Proof, error) {
	id := failuresID(address, user)
	c, err := l.read(ctx, user)
	for {
		if err != nil {
			return Proof{}, err
		}
		if !c.Enabled {
			return Proof{}, kverror.AuthNotEnabled
		}
		// Asked when it is this login's turn: others may have failed while it was queued.
		err = l.passwords.compare(ctx, c.Hash, password, func() error { return l.delayed(id) }, func() { l.fail(id) })
		if err != nil {
			return Proof{}, err
		}
		compared := c.Since
		if c, err = l.read(ctx, user); err == nil && c.Enabled && c.Since == compared {
			l.failed.note(id, l.clk.Now(), func(failures) failures { return failures{} })
			return Proof{User: user, Index: c.Index, Revision: c.Revision}, nil
		}
	}
}

// delayed refuses a login that comes too early after failures.
func (l *Logins) delayed(id recentID) error {
	now := l.clk.Now()
	if f, _ := l.failed.get(id, now); now < f.until {
		return kverror.New(kverror.TooManyRequests, "%d logins of this user and address have failed: the next may be tried in %v", f.count, f.until.Sub(now))
	}
	return nil
}

func (l *Logins) fail(id recentID) {
	now := l.clk.Now()
	l.failed.note(id, now, func(f failures) failures {
		f.count++
		if over := f.count - freeFailures; over > 0 {
			f.until = now.Add(min(maxDelay, firstDelay<<min(over-1, 10)))
		}
		return f
	})
}

// failuresID is a digest, so that long names take no memory.
func failuresID(address, user string) recentID {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q", address, user))
	return recentID(sum[:])
}
