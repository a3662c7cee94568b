package heat

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
)

// Store keeps the columns of a node in its engine. They are in no log: a crash loses those that the engine has in
// memory alone.
type Store struct {
	engine *engine.Engine
	log    *zap.Logger
	// reading holds a token while a map is made: it takes some 20 MiB for a moment.
	reading chan struct{}

	mu sync.Mutex
	// Guarded by mu. starts are the columns that are stored of each tier, ascending; known says that they have been read.
	starts [len(tiers)][]int64
	known  bool
}

// NewStore returns the store of the engine's columns.
func NewStore(e *engine.Engine, log *zap.Logger) *Store {
	return &Store{engine: e, log: log, reading: make(chan struct{}, 1)}
}

// columnKey is where the column of a tier that begins then is stored.
func columnKey(tier int, start int64) []byte {
	return engine.NodeLocalKey(binary.BigEndian.AppendUint64([]byte{'h', 'e', 'a', 't', '/', byte(tier)}, uint64(start)))
}

// startOf is where the column begins that has the key.
func startOf(key []byte) int64 { return int64(binary.BigEndian.Uint64(key[len(key)-8:])) }

// Add adds a minute, which begins at so many unix seconds, to the columns of all tiers that it lies in.
func (s *Store) Add(at int64, c Column) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.learnLocked(); err != nil {
		return err
	}
	b := s.engine.NewBatch()
	defer b.Close()
	for tier := range tiers {
		start := at - at%tiers[tier].width
		if err := s.addLocked(b, tier, start, c); err != nil {
			return err
		}
	}
	return b.Commit()
}

// addLocked writes one column anew.
func (s *Store) addLocked(b *engine.Batch, tier int, start int64, c Column) error {
	key, bands := columnKey(tier, start), []band{c.band(0)}
	i, stored := slices.BinarySearch(s.starts[tier], start)
	if stored {
		form, _, err := s.engine.Get(key)
		if err != nil {
			return err
		}
		bands = append(bands, s.decode(form).band(0))
	} else {
		s.starts[tier] = slices.Insert(s.starts[tier], i, start)
	}
	_, form := pack(bands)
	if err := b.Set(key, form); err != nil {
		return err
	}
	// The column farthest from now goes first. It is the oldest one, unless the clock was ahead for a while.
	for n := len(s.starts[tier]); n > tiers[tier].kept; n-- {
		far := 0
		if s.starts[tier][n-1]-start > start-s.starts[tier][0] {
			far = n - 1
		}
		if err := b.Delete(columnKey(tier, s.starts[tier][far])); err != nil {
			return err
		}
		s.starts[tier] = slices.Delete(s.starts[tier], far, far+1)
	}
	return nil
}

// decode is decode, and nothing where there is no column.
func (s *Store) decode(form []byte) Column {
	c, err := decode(form)
	if err != nil {
		s.log.Warn("a column of the heat map is left out", zap.Error(err))
	}
	return c
}

// learnLocked reads which columns there are.
func (s *Store) learnLocked() error {
	if s.known {
		return nil
	}
	for tier := range tiers {
		s.starts[tier] = nil
		err := s.scan(tier, 0, 1<<62, func(start int64, _ func() ([]byte, error)) error {
			s.starts[tier] = append(s.starts[tier], start)
			return nil
		})
		if err != nil {
			return err
		}
	}
	s.known = true
	return nil
}

// scan calls f with each stored column of the tier that begins in [from, to), and what reads its form.
func (s *Store) scan(tier int, from, to int64, f func(start int64, form func() ([]byte, error)) error) (err error) {
	it, err := s.engine.NewIter(engine.IterOptions{Lower: columnKey(tier, from), Upper: columnKey(tier, to)})
	if err != nil {
		return err
	}
	defer func() {
		if cerr := it.Close(); err == nil && cerr != nil {
			err = fmt.Errorf("heat: read columns: %w", cerr)
		}
	}()
	for ok := it.First(); ok; ok = it.Next() {
		if err := f(startOf(it.Key()), it.ValueAndErr); err != nil {
			return err
		}
	}
	if err := it.Error(); err != nil {
		return fmt.Errorf("heat: read columns: %w", err)
	}
	return nil
}

// Grid returns the map of what this node has served. It makes one at a time.
func (s *Store) Grid(ctx context.Context, q Query) (*Grid, error) {
	if err := q.check(); err != nil {
		return nil, err
	}
	select {
	case s.reading <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("heat: wait for another query: %w", context.Cause(ctx))
	}
	defer func() { <-s.reading }()
	tier := 0
	for tier+1 < len(tiers) && q.Width%tiers[tier+1].width == 0 {
		tier++
	}
	var bands []band
	err := s.scan(tier, q.From, q.end(), func(start int64, form func() ([]byte, error)) error {
		b, err := form()
		if err != nil {
			return fmt.Errorf("heat: read a column: %w", err)
		}
		bands = append(bands, s.decode(b).band(int((start-q.From)/q.Width)))
		return ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	return q.grid(bands), nil
}
