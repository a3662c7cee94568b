package target

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path"
	"strings"
)

// folder is a Target in a file system.
type folder struct {
	path string
	root *os.Root
}

func openFolder(p string) (*folder, error) {
	if err := os.MkdirAll(p, 0o700); err != nil {
		return nil, fmt.Errorf("target file://%s: %w", p, err)
	}
	root, err := os.OpenRoot(p)
	if err != nil {
		return nil, fmt.Errorf("target file://%s: %w", p, err)
	}
	return &folder{path: p, root: root}, nil
}

// String implements Target.
func (f *folder) String() string { return "file://" + f.path }

// Put implements Target. A hard link gives the whole file its name, and fails if the name is
// taken; a rename would not.
func (f *folder) Put(ctx context.Context, name string, r io.Reader) error {
	if err := checkName(name); err != nil {
		return failed("put", f, name, err)
	}
	if err := f.put(name, contextReader{ctx, r}); err != nil {
		if errors.Is(err, fs.ErrExist) {
			err = ErrExists
		}
		return failed("put", f, name, err)
	}
	return nil
}

func (f *folder) put(name string, r io.Reader) (err error) {
	dir := path.Dir(name)
	if _, err := f.root.Lstat(name); err == nil {
		return fs.ErrExist // before anything is written
	}
	if err := f.mkdir(dir); err != nil {
		return err
	}
	temp := path.Join(dir, tempPrefix+rand.Text())
	file, err := f.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if rmErr := f.root.Remove(temp); err == nil {
			err = rmErr
		}
		if err == nil {
			err = f.sync(dir)
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
	return f.root.Link(temp, name)
}

// mkdir makes a folder and those above it, and makes their names durable.
func (f *folder) mkdir(dir string) error {
	if dir == "." {
		return nil
	}
	if info, err := f.root.Stat(dir); err == nil && info.IsDir() {
		return nil
	}
	if err := f.mkdir(path.Dir(dir)); err != nil {
		return err
	}
	if err := f.root.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return f.sync(path.Dir(dir))
}

func (f *folder) sync(dir string) error {
	d, err := f.root.Open(dir)
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
	file, err := f.root.Open(name)
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
		root := path.Clean("./" + dir)
		errStop := errors.New("stop")
		err := fs.WalkDir(f.root.FS(), root, func(p string, d fs.DirEntry, err error) error {
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
	if err := f.root.Remove(name); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return failed("delete", f, name, err)
	}
	dir := path.Dir(name)
	for dir != "." && f.root.Remove(dir) == nil {
		dir = path.Dir(dir)
	}
	if err := f.sync(dir); err != nil {
		return failed("delete", f, name, err)
	}
	return nil
}
