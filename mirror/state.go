package mirror

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// Step is how far a mirror is.
type Step string

// The steps, in order, then the other ends.
const (
	Copying   Step = "copying"   // the watch fills the spool, a snapshot is fetched
	Importing Step = "importing" // the snapshot is loaded
	Following Step = "following" // the spool is applied
	Finishing Step = "finishing" // the target is being opened
	Done      Step = "done"
	Failed    Step = "failed"
	Abandoned Step = "abandoned"
)

// Names in the directory of a mirror.
const (
	stateName    = "state.json"
	statusName   = "status.json"
	lockName     = "LOCK"
	snapshotName = "snapshot.db"
	partName     = "snapshot.part"
	spoolName    = "spool"
	// Requests are files, so that they outlive a mirror that is killed, and can be made
	// while none runs.
	cutoverName = "cutover"
	abandonName = "abandon"
)

const stateVersion = 1

// state is what a mirror must know after a crash. It is changed by a rename.
type state struct {
	Version int    `json:"version"`
	Step    Step   `json:"step"`
	Nonce   string `json:"nonce"`
	// Source is the cluster id of the source.
	Source uint64 `json:"source"`
	// After is the revision behind which the watch began.
	After keyspace.Revision `json:"after"`
	// Counted is the revision up to which Sum has all versions that the source had: it is at or
	// below the target's position. Compacted is that of the imported file.
	Counted   keyspace.Revision `json:"counted,omitempty"`
	Sum       Sum               `json:"sum"`
	Compacted keyspace.Revision `json:"compacted,omitempty"`
	// Compared says that a whole comparison has ended, in this run or an earlier one.
	Compared bool `json:"compared,omitempty"`
	// Finish is what the target is finished with, from step finishing on.
	Finish *Finish `json:"finish,omitempty"`
	// Stop says why the mirror failed.
	Stop *Stop `json:"stop,omitempty"`
}

// Status is what a mirror tells of itself.
type Status struct {
	Step Step `json:"step"`
	// Running says that a process holds the directory.
	Running bool `json:"running"`
	// Position is the revision up to which the target has everything, Spooled that of the
	// spool, Source the highest that the source is known to have.
	Position keyspace.Revision `json:"position"`
	Spooled  keyspace.Revision `json:"spooled"`
	Source   keyspace.Revision `json:"source"`
	// SpoolBytes is the size of the spool.
	SpoolBytes int64 `json:"spool_bytes"`
	// LagSeconds is how long ago the source made the first revision that the target lacks.
	LagSeconds float64 `json:"lag_seconds"`
	// RevisionsPerSecond is how fast the position moved in the last ten seconds.
	RevisionsPerSecond float64 `json:"revisions_per_second"`
	// VerifiedKeys and VerifiedPages count what was compared and equal, Passes whole comparisons, all since the
	// start. VerifiedFrom is the position at which the last whole one began.
	VerifiedKeys  int64             `json:"verified_keys"`
	VerifiedPages int64             `json:"verified_pages"`
	Passes        int64             `json:"passes"`
	VerifiedFrom  keyspace.Revision `json:"verified_from"`
	// Compared says that a whole comparison has ended since the mirror began: before that no cut-over can be requested.
	Compared bool `json:"compared"`
	// PassKeys is how many keys the present comparison has, of about PassOf that the target had when it began.
	PassKeys int64 `json:"pass_keys"`
	PassOf   int64 `json:"pass_of"`
	// Waiting is the error that the mirror waits out.
	Waiting string `json:"waiting,omitempty"`
	// Cutover is what a requested cut-over waits for.
	Cutover string `json:"cutover,omitempty"`
	// Refused says why the last request for a cut-over was withdrawn.
	Refused *Refusal `json:"refused,omitempty"`
	// FreezeSeconds is how long the source had to stand still for the cut-over.
	FreezeSeconds float64 `json:"freeze_seconds,omitempty"`
	// Warning is what was found after the cut-over.
	Warning string `json:"warning,omitempty"`
	// Stopped says why a failed mirror stopped and what to do.
	Stopped string    `json:"stopped,omitempty"`
	At      time.Time `json:"at"`
}

// String returns the status in one line.
func (s Status) String() string {
	line := fmt.Sprintf("%s: position %d of %d, behind by %d revisions (%.1f s), %.0f revisions/s, %d keys verified, %d passes",
		s.Step, s.Position, s.Source, max(0, s.Source-s.Position), s.LagSeconds, s.RevisionsPerSecond, s.VerifiedKeys, s.Passes)
	if s.VerifiedFrom > 0 {
		line += fmt.Sprintf(", the last from revision %d on", s.VerifiedFrom)
	}
	if !s.Compared && (s.Step == Copying || s.Step == Importing || s.Step == Following) {
		line += "; no cut-over yet: " + s.notCompared()
	}
	if s.Cutover != "" {
		line += "; the cut-over waits " + s.Cutover
	}
	if s.Refused != nil {
		line += "; the cut-over was refused: " + s.Refused.Error()
	}
	for _, more := range []string{s.Waiting, s.Warning, s.Stopped} {
		if more != "" {
			line += "; " + more
		}
	}
	return line
}

// notCompared says how far the first whole comparison is.
func (s *Status) notCompared() string {
	if s.Step != Following || s.PassOf == 0 {
		return "the first comparison of all keys has not begun"
	}
	return fmt.Sprintf("the first comparison of all keys has %d of about %d", s.PassKeys, s.PassOf)
}

// readState returns the state of a directory, or os.ErrNotExist.
func readState(fs vfs.FS, dir string) (state, error) {
	var st state
	if err := readJSON(fs, fs.PathJoin(dir, stateName), &st); err != nil {
		return st, err
	}
	if st.Version != stateVersion {
		return st, fmt.Errorf("%s has version %d; this build reads %d", fs.PathJoin(dir, stateName), st.Version, stateVersion)
	}
	return st, nil
}

func readJSON(fs vfs.FS, name string, into any) error {
	f, err := fs.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

// writeJSON replaces a file of the directory.
func writeJSON(fs vfs.FS, dir, name string, content any) error {
	b, err := json.Marshal(content)
	if err != nil {
		return err
	}
	temp := fs.PathJoin(dir, name+".tmp")
	f, err := fs.Create(temp, vfs.WriteCategoryUnspecified)
	if err == nil {
		_, err = f.Write(append(b, '\n'))
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err == nil {
		err = fs.Rename(temp, fs.PathJoin(dir, name))
	}
	if err == nil {
		err = syncDir(fs, dir)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", fs.PathJoin(dir, name), err)
	}
	return nil
}

func syncDir(fs vfs.FS, dir string) error {
	d, err := fs.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// requested says whether a request lies in the directory.
func requested(fs vfs.FS, dir, name string) (bool, error) {
	_, err := fs.Stat(fs.PathJoin(dir, name))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// RequestCutover asks the mirror of a directory to cut over: the one that runs, or the next
// one that is started. ReadStatus tells when it is done. If it cannot be done, the request is withdrawn. The error is a
// *Refusal before a whole comparison of source and target has ended.
func RequestCutover(fs vfs.FS, dir string) error { return request(fs, dir, cutoverName) }

// CutoverRequested says whether the request for a cut-over of the mirror of a directory stands. If it was withdrawn, the
// status says why.
func CutoverRequested(fs vfs.FS, dir string) (bool, error) { return requested(fs, dir, cutoverName) }

// RequestAbandon asks the mirror of a directory to give up.
func RequestAbandon(fs vfs.FS, dir string) error { return request(fs, dir, abandonName) }

func request(fs vfs.FS, dir, name string) error {
	st, err := readState(fs, dir)
	if err != nil {
		return fmt.Errorf("%s holds no mirror: give the --spool of `skein mirror start`: %w", dir, err)
	}
	if st.Step == Done || st.Step == Abandoned || st.Step == Failed && name == cutoverName {
		return fmt.Errorf("the mirror in %s has ended: it is %s", dir, st.Step)
	}
	if name == cutoverName && !st.Compared {
		s, err := ReadStatus(fs, dir)
		if err != nil {
			return err
		}
		// Who asks may have stopped the source's clients, and the comparison may take hours.
		return &Refusal{
			Reason: fmt.Sprintf("the mirror in %s is %s, and %s", dir, s.Step, s.notCompared()),
			Next:   "let the source's clients go on, and cut over when `skein mirror status` no longer says this; the mirror compares by itself while `skein mirror start` runs",
		}
	}
	return writeJSON(fs, dir, name, struct{}{})
}

// Nonce returns by which name the mirror of a directory is known to its target.
func Nonce(fs vfs.FS, dir string) (string, error) {
	st, err := readState(fs, dir)
	return st.Nonce, err
}

// ReadStatus returns what the mirror of a directory has told last.
func ReadStatus(fs vfs.FS, dir string) (Status, error) {
	st, err := readState(fs, dir)
	if err != nil {
		return Status{}, fmt.Errorf("%s holds no mirror: give the --spool of `skein mirror start`: %w", dir, err)
	}
	var s Status
	if err := readJSON(fs, fs.PathJoin(dir, statusName), &s); err != nil && !errors.Is(err, os.ErrNotExist) {
		return Status{}, err
	}
	s.Step, s.Compared = st.Step, st.Compared
	if st.Stop != nil {
		s.Stopped = st.Stop.Error()
	}
	lock, err := fs.Lock(fs.PathJoin(dir, lockName))
	if s.Running = err != nil; s.Running {
		return s, nil
	}
	return s, lock.Close()
}
