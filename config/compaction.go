package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"
)

// The values of Compaction.Mode.
const (
	// CompactPeriodic keeps the revisions of some time.
	CompactPeriodic = "periodic"
	// CompactRevision keeps a number of revisions.
	CompactRevision = "revision"
)

// minCompactionPeriod bounds a periodic retention from below: a tenth of it is the
// time between two looks at the current revision.
const minCompactionPeriod = 10 * time.Millisecond

// Compaction says how old versions go.
type Compaction struct {
	// Mode is CompactPeriodic or CompactRevision. Default periodic.
	Mode string
	// Retention is how much history is kept, as etcd reads it: a number means hours or
	// revisions, anything else is a duration. Zero in any form switches automatic compaction
	// off, which is the default. If it is too short, slow watchers lose their history.
	Retention string
	// BatchLimit bounds the versions of one step of removal; 0 means 1000.
	BatchLimit int
	// SleepInterval is the pause after each step; 0 means as long as keeps removal at a
	// quarter of a core.
	SleepInterval time.Duration
}

// Keep returns what automatic compaction keeps: in periodic mode the revisions of a
// period, in revision mode a number of them. The other one, or both where there is
// none, are 0.
func (c *Compaction) Keep() (period time.Duration, revisions int64, err error) {
	n, err := c.retention()
	if err != nil || n == 0 {
		return 0, 0, err
	}
	if c.Mode == CompactRevision {
		return 0, n, nil
	}
	return time.Duration(n), 0, nil
}

// retention reads Retention as etcd does: a duration in revision mode is as many
// revisions as it has nanoseconds.
func (c *Compaction) retention() (int64, error) {
	if c.Retention == "" {
		return 0, nil
	}
	if n, err := strconv.Atoi(c.Retention); err == nil && n >= 0 {
		switch {
		case c.Mode == CompactRevision:
			return int64(n), nil
		case int64(n) > math.MaxInt64/int64(time.Hour):
			return 0, fmt.Errorf("--auto-compaction-retention=%s is out of range", c.Retention)
		}
		return int64(n) * int64(time.Hour), nil
	}
	d, err := time.ParseDuration(c.Retention)
	if err != nil {
		return 0, fmt.Errorf("--auto-compaction-retention: error parsing CompactionRetention: %w", err)
	}
	return int64(d), nil
}

func (c *Compaction) validate() error {
	switch c.Mode {
	case CompactPeriodic, CompactRevision:
	case "":
		return errors.New("undefined auto-compaction-mode")
	default:
		return fmt.Errorf("unknown auto-compaction-mode %q", c.Mode)
	}
	period, revisions, err := c.Keep()
	switch {
	case err != nil:
		return err
	case period < 0 || revisions < 0:
		return fmt.Errorf("--auto-compaction-retention must not be negative (set to %s)", c.Retention)
	case period > 0 && period < minCompactionPeriod:
		return fmt.Errorf("--auto-compaction-retention must be at least %v (set to %s)", minCompactionPeriod, c.Retention)
	case c.SleepInterval < 0:
		return fmt.Errorf("--compaction-sleep-interval must not be negative (set to %v)", c.SleepInterval)
	}
	return nil
}

func compactionFlags() []Flag {
	return []Flag{
		{
			Name: "auto-compaction-mode", kind: kindString, Default: CompactPeriodic, File: "auto-compaction-mode", Section: sectionClustering,
			Usage: "How auto-compaction-retention is meant: periodic (a duration) or revision (a number of revisions).",
			set:   setString(func(c *Config) *string { return &c.Compaction.Mode }),
		},
		{
			Name: "auto-compaction-retention", kind: kindString, Default: "0", File: "auto-compaction-retention", Section: sectionClustering,
			Usage: "What automatic compaction keeps: hours or a duration, or revisions. 0 switches it off.",
			Note:  "The node that allocates revisions compacts. Negative, or less than 10ms, is refused.",
			set:   setString(func(c *Config) *string { return &c.Compaction.Retention }),
		},
		{
			Name: "compaction-batch-limit", kind: kindInt, Default: "0", File: "compaction-batch-limit", Section: sectionFeatures,
			Usage: "Versions that one step of the removal of old ones looks at (0 for 1000).",
			set: func(c *Config, v value) error {
				if v.i < 0 || v.i > math.MaxInt32 {
					return errors.New("value out of range")
				}
				c.Compaction.BatchLimit = int(v.i)
				return nil
			},
		},
		{
			Name: "compaction-sleep-interval", kind: kindDuration, Default: "0s", File: "compaction-sleep-interval", Section: sectionFeatures,
			Usage: "Pause after each step of the removal of old versions.",
			Note:  "0 is three times as long as the step took, so that removal takes a quarter of a core at most; in etcd it is 10 ms.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.Compaction.SleepInterval }),
		},
	}
}
