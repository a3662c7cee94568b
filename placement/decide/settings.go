package decide

import (
	"time"

	"github.com/skeindb/skein/clock"
)

// Settings are the cluster's, as an operator has them. The zero value of a field that
// Defaults fills is not a setting: start from Defaults.
type Settings struct {
	// ReplicationFactor is the number of voters that a range should have.
	ReplicationFactor int
	// NodeDeadAfter is how long a node may be silent before its replicas are rebuilt
	// elsewhere. One that is decommissioned is not to come back, and is not waited for.
	NodeDeadAfter time.Duration
	// AbandonAfter is how long an operation waits for a silent node that it needs, and a
	// repair at least for a isolated one. It is at most NodeDeadAfter.
	AbandonAfter time.Duration
	// RangeMaxBytes is the size above which a range is split by its leader, and SplitLoad the
	// number of puts and reads a second. Two neighbours are merged below a quarter of each.
	RangeMaxBytes int64
	SplitLoad     int64
	// NodeCopies bounds the copies of replicas that a node receives at a time, and
	// those that it sends. Balance takes at most half of them, at least one.
	NodeCopies int
	// SmallCopies bounds them where they are small: beyond NodeCopies a node is given another
	// one as long as those under way have less than SmallBytes together. What a small copy
	// takes is mostly waiting. Of balance, half of both. 0 is none beyond NodeCopies.
	SmallCopies int
	SmallBytes  int64
	// NodeTasks bounds the operations without a copy that a node leads at a time.
	NodeTasks int
	// MaxOperations bounds the operations under way in the cluster.
	MaxOperations int
	// Band is the part of its share by which a node's bytes or leaders may be off before
	// anything is moved, though always by one range; Rest is where moving ends.
	Band, Rest float64
	// LoadBand and LoadRest are the same for load, which is noisier. Load below MinLoad
	// a second is not worth a move.
	LoadBand, LoadRest float64
	MinLoad            int64
	// Patience is how long load must have been too high before it moves
	// anything, and how long a node for which nothing was found is left alone.
	Patience time.Duration
	// CoolDown is how long a range that was moved or whose leader was moved for balance
	// is not moved for balance again.
	CoolDown time.Duration
	// MergeAge is how old two neighbours must be, each since its last split or merge, and for
	// how long they must have been small and cold together, before they are merged. 0 merges
	// nothing.
	MergeAge time.Duration
	// MergeRetry is how long two neighbours are left alone after their merge has failed. Each
	// failure doubles it. After MergeTries failures they are left alone until one of them has
	// changed.
	MergeRetry time.Duration
	MergeTries int
	// NodeMerges bounds the merges whose ranges a node leads at a time: each has every
	// store of its ranges written out twice.
	NodeMerges int
	// MinRanges is the number of ranges below which nothing is merged.
	MinRanges int
	// FullAt is the part of a node's capacity above which it takes no replica.
	FullAt float64
	// RangeCost is what a replica counts beyond its bytes, so that empty ranges are
	// spread too.
	RangeCost int64
	// Paused stops all decisions.
	Paused bool
}

// Defaults returns the settings of a cluster whose operator has set none.
func Defaults() Settings {
	return Settings{
		ReplicationFactor: 3,
		NodeDeadAfter:     5 * time.Minute,
		AbandonAfter:      30 * time.Second,
		RangeMaxBytes:     256 << 20,
		SplitLoad:         2500,
		NodeCopies:        2,
		NodeTasks:         8,
		MaxOperations:     8192,
		Band:              0.05,
		Rest:              0.03,
		LoadBand:          0.20,
		LoadRest:          0.10,
		MinLoad:           100,
		Patience:          30 * time.Second,
		CoolDown:          10 * time.Minute,
		MergeAge:          time.Hour,
		MergeRetry:        5 * time.Minute,
		MergeTries:        5,
		NodeMerges:        1,
		MinRanges:         1,
		FullAt:            0.90,
		RangeCost:         1 << 20,
	}
}

// Lost says whether the node counts as lost: it has been silent for so long that its replicas are
// rebuilt elsewhere.
func (s *Settings) Lost(n *Node, now clock.Time) bool {
	return n.Silent && (n.State == Decommissioning || now.Sub(n.SilentSince) >= s.NodeDeadAfter)
}

// bears says whether a node that receives or sends so many copies, of so many bytes, may get
// another one. bearsBalance says the same of copies for balance, but counts the bytes of all
// copies.
func (s *Settings) bears(copies int, bytes int64) bool {
	return copies < s.NodeCopies || copies < s.SmallCopies && bytes < s.SmallBytes
}

func (s *Settings) bearsBalance(copies int, bytes int64) bool {
	return copies < max(1, s.NodeCopies/2) || copies < s.SmallCopies/2 && bytes < s.SmallBytes/2
}

// mergeBytes and mergeLoad bound what two neighbours have together if they are merged: a
// quarter of the bound of a split, so that neither growth nor noise splits them again soon.
func (s *Settings) mergeBytes() int64 { return s.RangeMaxBytes / 4 }
func (s *Settings) mergeLoad() int64  { return s.SplitLoad / 4 }
