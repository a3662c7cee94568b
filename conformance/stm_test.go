package conformance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"

	"go.etcd.io/etcd/client/v3/concurrency"
)

const (
	accounts  = 12
	deposit   = 100
	tellers   = 9
	transfers = 12 // of each
)

func account(i int) string { return fmt.Sprintf("bank/%02d", i) }

// Transfers between accounts in many ranges. At no moment is money lost or created, and
// no transfer is lost, by a counter that each one increments.
func TestSTM(t *testing.T) {
	t.Parallel()
	for _, level := range []struct {
		name  string
		level concurrency.Isolation
	}{
		{"serializable snapshot", concurrency.SerializableSnapshot},
		{"serializable", concurrency.Serializable},
	} {
		t.Run(level.name, func(t *testing.T) { bank(t, level.level) })
	}
}

func bank(t *testing.T, level concurrency.Isolation) {
	t.Helper()
	r, ctx := newRig(t, tellers)
	for i := range accounts {
		if _, err := r.clients[0].Put(ctx, account(i), strconv.Itoa(deposit)); err != nil {
			t.Fatal(err)
		}
	}
	isolation := concurrency.WithIsolation(level)
	var workers sync.WaitGroup
	for i, client := range r.clients {
		workers.Go(func() {
			chance := rand.New(rand.NewPCG(uint64(i), 1))
			for n := range transfers {
				if n%2 == i%2 {
					r.cut(account(chance.IntN(accounts)))
				}
				from, to, sum := chance.IntN(accounts), chance.IntN(accounts), 1+chance.IntN(deposit/2)
				_, err := concurrency.NewSTM(client, func(s concurrency.STM) error { return transfer(s, from, to, sum) }, isolation, concurrency.WithAbortContext(ctx))
				if err != nil {
					t.Errorf("teller %d, transfer %d: %v", i, n, err)
				}
				var seen int
				_, err = concurrency.NewSTM(client, func(s concurrency.STM) (err error) {
					seen, err = total(s)
					return err
				}, isolation, concurrency.WithAbortContext(ctx))
				if err != nil || seen != accounts*deposit {
					t.Errorf("teller %d sees %d of %d, %v", i, seen, accounts*deposit, err)
				}
			}
		})
	}
	workers.Wait()
	checkBank(ctx, t, r)
}

// checkBank reads everything at the end.
func checkBank(ctx context.Context, t *testing.T, r *rig) {
	t.Helper()
	var sum int
	for i := range accounts {
		got, err := r.clients[0].Get(ctx, account(i))
		if err != nil || len(got.Kvs) != 1 {
			t.Fatalf("%s: %v, %v", account(i), got, err)
		}
		n, err := strconv.Atoi(string(got.Kvs[0].Value))
		if err != nil || n < 0 {
			t.Errorf("%s has %d, %v", account(i), n, err)
		}
		sum += n
	}
	made, err := r.clients[0].Get(ctx, "transfers")
	if err != nil || sum != accounts*deposit || string(made.Kvs[0].Value) != strconv.Itoa(tellers*transfers) {
		t.Errorf("%d of %d are there, after %v of %d transfers; %v", sum, accounts*deposit, made, tellers*transfers, err)
	}
	if r.splits.Load() < accounts/2 {
		t.Errorf("only %d splits", r.splits.Load())
	}
	t.Logf("%d transfers, %d splits", tellers*transfers, r.splits.Load())
}

// transfer moves money if it is there, and counts itself.
func transfer(s concurrency.STM, from, to, sum int) error {
	made, err := number(s, "transfers")
	if err != nil {
		return err
	}
	s.Put("transfers", strconv.Itoa(made+1))
	has, err := number(s, account(from))
	if err != nil || has < sum || from == to {
		return err
	}
	gets, err := number(s, account(to))
	s.Put(account(from), strconv.Itoa(has-sum))
	s.Put(account(to), strconv.Itoa(gets+sum))
	return err
}

func total(s concurrency.STM) (sum int, err error) {
	for i := range accounts {
		n, err := number(s, account(i))
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

func number(s concurrency.STM, key string) (int, error) {
	text := s.Get(key)
	if text == "" {
		return 0, nil
	}
	return strconv.Atoi(text)
}
