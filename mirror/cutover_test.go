package mirror

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/mirror/diff"
)

// stateDisk is a disk on which the state of one step cannot be written for a while.
type stateDisk struct {
	*simdisk.Disk
	step Step
	// fails counts how many more writes fail, hit is called when one does.
	fails int
	hit   func()
	// late says that the file is replaced, and only the sync of the directory fails.
	late    bool
	pending atomic.Bool // that sync comes next
}

func (d *stateDisk) Rename(from, to string) error {
	if !strings.HasSuffix(to, stateName) || d.fails == 0 {
		return d.Disk.Rename(from, to)
	}
	var st state
	if err := readJSON(d.Disk, from, &st); err != nil {
		return err
	}
	if st.Step != d.step {
		return d.Disk.Rename(from, to)
	}
	d.fails--
	d.hit()
	if !d.late {
		return errFull
	}
	d.pending.Store(true)
	return d.Disk.Rename(from, to)
}

func (d *stateDisk) OpenDir(name string) (vfs.File, error) {
	if d.pending.CompareAndSwap(true, false) {
		return nil, errFull
	}
	return d.Disk.OpenDir(name)
}

// TestFullDiskAtCutover: the disk is full just when the cut-over is noted, and the source is written to again, or the target cannot
// be opened any more. The mirror goes on, also if it is started anew, and cuts over once it can.
func TestFullDiskAtCutover(t *testing.T) {
	for name, late := range map[string]bool{"nothing is written": false, "only the sync fails": true} {
		for _, refuses := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s, d := newSource(1), newTarget()
					s.txn(op{"a", "1", 0})
					full := &stateDisk{Disk: simdisk.New(), step: Finishing, fails: 1, late: late}
					var failed, refuse atomic.Bool
					full.hit = func() {
						refuse.Store(refuses)
						if !refuses {
							s.txn(op{"a", "2", 0})
						}
						failed.Store(true)
					}
					o := options(s, d, full.Disk)
					o.FS = full
					o.Prepare = func(context.Context) error {
						if refuse.Load() {
							return &Refusal{Reason: "node n2 does not answer", Next: "start it"}
						}
						return nil
					}
					ctx, kill := context.WithCancel(t.Context())
					ended := start(ctx, o)
					time.Sleep(10 * time.Second)
					cutOver(t, full.Disk)
					for !failed.Load() {
						time.Sleep(10 * time.Millisecond)
					}
					time.Sleep(time.Second)
					if st, err := readState(full.Disk, "m"); err != nil || st.Step != Following {
						t.Fatalf("the next start would find %s, %v", st.Step, err)
					}
					s.txn(op{"a", "3", 0})
					time.Sleep(time.Second)
					phase, rev, err := d.State(t.Context(), o.Nonce)
					if err != nil || rev != s.present() || phase != TargetLoading {
						t.Fatalf("the target is %s at revision %d, the source at %d: %v", phase, rev, s.present(), err)
					}
					kill()
					if err := <-ended; !errors.Is(err, context.Canceled) {
						t.Fatal(err)
					}
					refuse.Store(false)
					s.txn(op{"a", "4", 0})
					ended = start(t.Context(), o)
					time.Sleep(10 * time.Second)
					if refuses {
						cutOver(t, full.Disk)
					}
					if err := <-ended; err != nil {
						t.Fatal(err)
					}
					finished(t, s, d)
				})
			})
		}
	}
}

// TestFullDiskBehindCutover: the target serves and the disk is full just then. The mirror notes it once there is room, and asks the target
// for nothing more: it checks users by now.
func TestFullDiskBehindCutover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d := newSource(1), newTarget()
		s.txn(op{"a", "1", 0})
		full := &stateDisk{Disk: simdisk.New(), step: Done, fails: 3, hit: func() {}}
		o := options(s, d, full.Disk)
		o.FS = full
		var serving atomic.Bool
		d.onCall(func(what string) error {
			if what == "finish" {
				serving.Store(true)
			}
			if serving.Load() && (what == "count" || what == "page" || what == "leases") {
				return rpctypes.ErrUserEmpty
			}
			return nil
		})
		ended := following(t, s, d, o)
		time.Sleep(10 * time.Second)
		cutOver(t, full.Disk)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		finished(t, s, d)
		if st, err := ReadStatus(full.Disk, "m"); err != nil || st.Step != Done || full.fails != 0 {
			t.Errorf("%+v, %v", st, err)
		}
	})
}

// TestAbandonUnreadable: a mirror whose spool this build cannot read, or whose source is gone, can be abandoned.
func TestAbandonUnreadable(t *testing.T) {
	for _, gone := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s, d, disk := newSource(1), newTarget(), simdisk.New()
			s.txn(op{"a", "1", 0})
			o := options(s, d, disk)
			ctx, kill := context.WithCancel(t.Context())
			ended := start(ctx, o)
			time.Sleep(3 * time.Second)
			kill()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			if gone {
				s.onCall(func(string) error { return rpctypes.ErrNoLeader })
			} else {
				spoil(t, disk, "m/spool")
				if err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "the format has version") {
					t.Fatal(err)
				}
			}
			if err := RequestAbandon(disk, "m"); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := Run(ctx, o); err == nil || !strings.Contains(err.Error(), "the mirror is abandoned") || d.phase != TargetAbandoned {
				t.Errorf("the target is %s: %v", d.phase, err)
			}
		})
	}
}

// spoil has the newest segment of a spool be of a version that does not exist.
func spoil(t *testing.T, disk *simdisk.Disk, dir string) {
	t.Helper()
	names, err := disk.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	name := dir + "/" + slices.Max(slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, ".spool") }))
	f, err := disk.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	binary.LittleEndian.PutUint32(b[8:], 99)
	binary.LittleEndian.PutUint32(b[48:], crc32.Checksum(b[:48], crc32.MakeTable(crc32.Castagnoli)))
	w, err := disk.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	w.Close()
}

// statFails is a disk on which it cannot be told whether the mirror is to be given up.
type statFails struct {
	*simdisk.Disk
	fails atomic.Bool
}

func (d *statFails) Stat(name string) (vfs.FileInfo, error) {
	if d.fails.Load() && strings.HasSuffix(name, abandonName) {
		return nil, syscall.EIO
	}
	return d.Disk.Stat(name)
}

// TestAbandonByNobody: a directory that cannot be read is no request to give the mirror up.
func TestAbandonByNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), &statFails{Disk: simdisk.New()}
		s.txn(op{"a", "1", 0})
		o := options(s, d, disk.Disk)
		o.FS = disk
		ended := following(t, s, d, o)
		disk.fails.Store(true)
		if err := <-ended; !errors.Is(err, syscall.EIO) {
			t.Errorf("%v", err)
		}
		if err := Run(t.Context(), o); !errors.Is(err, syscall.EIO) || d.phase != TargetLoading {
			t.Errorf("the target is %s: %v", d.phase, err)
		}
	})
}

// TestStatusBesideAStart: who reads the status at the moment of a start does not keep the mirror from its directory.
func TestStatusBesideAStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		s.txn(op{"a", "1", 0})
		o := options(s, d, disk)
		if err := disk.MkdirAll(o.Dir, 0o700); err != nil {
			t.Fatal(err)
		}
		reads, err := disk.Lock(disk.PathJoin(o.Dir, lockName))
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(lockPause+lockPause/2, func() { _ = reads.Close() })
		ctx, kill := context.WithCancel(t.Context())
		ended := following(t, s, d, o)
		second := start(ctx, o) // a mirror runs, and another one has no business there
		if err := <-second; err == nil || !strings.Contains(err.Error(), "another process uses it") {
			t.Errorf("a second mirror of one directory: %v", err)
		}
		kill()
		cutOver(t, disk)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	})
}

// TestCutoverBeforeComparison: as long as no whole comparison has ended, a cut-over is refused at once, since the source's clients may
// stand still by then. The text says how far the comparison is, and what to do. One that an earlier process has ended counts.
func TestCutoverBeforeComparison(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keys = 20 * diff.PageKeys
		s, d, disk := newSource(1), newTarget(), simdisk.New()
		for i := range keys {
			s.txn(op{fmt.Sprintf("key-%06d", i), "v", 0})
		}
		o := options(s, d, disk)
		o.VerifyBytesPerSecond = 20_000 // a pass takes about two minutes
		refused := func(want string) {
			t.Helper()
			err := RequestCutover(disk, "m")
			if refusal := (*Refusal)(nil); !errors.As(err, &refusal) || !strings.Contains(err.Error(), want) ||
				!strings.Contains(err.Error(), "let the source's clients go on, and cut over when `skein mirror status` no longer says this") {
				t.Errorf("%v, want %s", err, want)
			}
			stands, err := CutoverRequested(disk, "m")
			if st, bad := ReadStatus(disk, "m"); err != nil || bad != nil || stands || st.Compared || !strings.Contains(st.String(), "no cut-over yet: the first") || !strings.Contains(st.String(), want) {
				t.Errorf("the request stands: %t; %v, %v; %v", stands, st, bad, err)
			}
		}
		run := func(f func(ended <-chan error)) {
			ctx, kill := context.WithCancel(t.Context())
			ended := start(ctx, o)
			f(ended)
			kill()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
		}
		var away atomic.Bool
		away.Store(true)
		s.onCall(func(what string) error {
			if what == "snapshot" && away.Load() {
				return rpctypes.ErrNoLeader
			}
			return nil
		})
		run(func(<-chan error) {
			time.Sleep(3 * time.Second)
			refused("the first comparison of all keys has not begun") // it is copying
			away.Store(false)
			time.Sleep(time.Minute)
			refused(fmt.Sprintf("000 of about %d", keys))
		})
		refused(fmt.Sprintf("000 of about %d", keys))
		run(func(ended <-chan error) { // the comparison begins anew
			for began := time.Now(); time.Since(began) < 5*time.Minute; time.Sleep(time.Second) {
				if st, err := ReadStatus(disk, "m"); err != nil {
					t.Fatal(err)
				} else if st.Compared {
					return
				}
			}
			st, err := ReadStatus(disk, "m")
			select {
			case end := <-ended:
				t.Fatalf("the mirror has ended: %v", end)
			default:
				t.Fatalf("no comparison has ended: %+v, %v", st, err)
			}
		})
		ended := start(t.Context(), o)
		began := time.Now()
		if err := RequestCutover(disk, "m"); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the cut-over took %v", took)
		}
		finished(t, s, d)
	})
}
