package target

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Errors of a Target, to be tested with errors.Is.
var (
	// ErrExists says that the name is taken.
	ErrExists = errors.New("exists already")
	// ErrNotFound says that there is no file of the name.
	ErrNotFound = errors.New("not found")
)

// tempPrefix begins the names of files that are not whole yet.
const tempPrefix = ".tmp-"

// failed wraps an error with the operation and the file's name.
func failed(op string, t Target, name string, err error) error {
	return fmt.Errorf("%s %s in %s: %w", op, name, t, err)
}

// checkName refuses names that a folder or a service might read differently.
func checkName(name string) error {
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part == "." || part == ".." || strings.HasPrefix(part, tempPrefix) {
			return fmt.Errorf("name %q: empty, \".\", \"..\" or temporary part", name)
		}
	}
	if i := strings.IndexFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || strings.ContainsRune(`\:*?"<>|#%`, r) }); i >= 0 {
		return fmt.Errorf("name %q: unusual character %q", name, name[i])
	}
	return nil
}

// checkFolder refuses what List cannot mean.
func checkFolder(folder string) error {
	if folder == "" {
		return nil
	}
	name, ok := strings.CutSuffix(folder, "/")
	if !ok {
		return fmt.Errorf("folder %q does not end in \"/\"", folder)
	}
	return checkName(name)
}

// contextReader ends with its context.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(b)
}
