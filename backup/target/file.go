package target

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"iter"
	"os"
	"path"
	"strings"
	"sync"
)

// folder is a Target in a file system. It is made by the first Put, so that a wrong URL of a
// reader leaves nothing behind.
type folder struct {
	path string

	mu   sync.Mutex
	root *os.Root // nil until it was there
}

func openFolder(p string) *folder { return &folder{path: p} }

// open returns the folder. If it is not there, and is not to be made, the error is
// fs.ErrNotExist.
func (f *folder) open(makeIt bool) (*os.Root, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.root != nil {
		return f.root, nil
	}
	if makeIt {
		if err := os.MkdirAll(f.path, 0o700); err != nil {
			return nil, err
		}
	}
	root, err := os.OpenRoot(f.path)
	f.root = root
	return root, err
}

// String implements Target.
func (f *folder) String() string { return "file://" + f.path }

// Put implements Target. A hard link gives the whole file its name, and fails if the name is
// taken; a rename would not.
func (f *folder) Put(ctx context.Context, name string, r io.Reader) error {
	if err := checkName(name); err != nil {
		return failed("put", f, name, err)
	}
	root, err := f.open(true)
	if err == nil {
		err = put(root, name, contextReader{ctx, r})
	}
	if err != nil {
		if errors.Is(err, fs.ErrExist) {
			err = ErrExists
		}
		return failed("put", f, name, err)
	}
	return nil
}

func put(root *os.Root, name string, r io.Reader) (err error) {
	dir := path.Dir(name)
	if _, err := root.Lstat(name); err == nil {
		return fs.ErrExist // before anything is written
	}
	if err := mkdir(root, dir); err != nil {
		return err
	}
	temp := path.Join(dir, tempPrefix+rand.Text())
	file, err := root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if rmErr := root.Remove(temp); err == nil {
			err = rmErr
		}
		if err == nil {
			err = syncDir(root, dir)
		}
	}()
	_, err = io.Copy(file, r)
	if err == nil {
		err = file.Sync()
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	return root.Link(temp, name)
}

// mkdir makes a folder and those above it, and makes their names durable.
func mkdir(root *os.Root, dir string) error {
	if dir == "." {
		return nil
	}
	if info, err := root.Stat(dir); err == nil && info.IsDir() {
		return nil
	}
	if err := mkdir(root, path.Dir(dir)); err != nil {
		return err
	}
	if err := root.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(root, path.Dir(dir))
}

func syncDir(root *os.Root, dir string) error {
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if closeErr := d.Close(); err == nil {
		err = closeErr
	}
	return err
}

// Get implements Target.
func (f *folder) Get(ctx context.Context, name string, offsetBytes int64) (io.ReadCloser, error) {
	if err := checkName(name); err != nil {
		return nil, failed("get", f, name, err)
	}
	root, err := f.open(false)
	var file *os.File
	if err == nil {
		file, err = root.Open(name)
	}
	if err == nil {
		if _, err = file.Seek(offsetBytes, io.SeekStart); err == nil {
			return struct {
				io.Reader
				io.Closer
			}{contextReader{ctx, file}, file}, nil
		}
		_ = file.Close()
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotFound
	}
	return nil, failed("get", f, name, err)
}

// List implements Target.
func (f *folder) List(ctx context.Context, dir string) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		if err := checkFolder(dir); err != nil {
			yield(Object{}, failed("list", f, dir, err))
			return
		}
		root, err := f.open(false)
		if errors.Is(err, fs.ErrNotExist) {
			return
		}
		if err != nil {
			yield(Object{}, failed("list", f, dir, err))
			return
		}
		errStop := errors.New("stop")
		err = fs.WalkDir(root.FS(), path.Clean("./"+dir), func(p string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				if errors.Is(err, fs.ErrNotExist) {
					return nil // the folder itself, or one that was removed meanwhile
				}
				return err
			case ctx.Err() != nil:
				return ctx.Err()
			case d.IsDir() || strings.HasPrefix(d.Name(), tempPrefix):
				return nil
			}
			info, err := d.Info()
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			if !yield(Object{Name: p, Bytes: info.Size(), Modified: info.ModTime()}, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && !errors.Is(err, errStop) {
			yield(Object{}, failed("list", f, dir, err))
		}
	}
}

// Delete implements Target. Folders that it leaves empty go, too.
func (f *folder) Delete(_ context.Context, name string) error {
	if err := checkName(name); err != nil {
		return failed("delete", f, name, err)
	}
	root, err := f.open(false)
	if err == nil {
		err = root.Remove(name)
	}
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return failed("delete", f, name, err)
	}
	dir := path.Dir(name)
	for dir != "." && root.Remove(dir) == nil {
		dir = path.Dir(dir)
	}
	err = syncDir(root, dir)
	for errors.Is(err, fs.ErrNotExist) && dir != "." {
		dir = path.Dir(dir) // another Delete has found the folder empty
		err = syncDir(root, dir)
	}
	if err != nil {
		return failed("delete", f, name, err)
	}
	return nil
}
