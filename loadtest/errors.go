package loadtest

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// maxErrorKinds bounds the kinds of errors. A text may contain an address or a
	// number and so make a kind of every error.
	maxErrorKinds = 64
	// maxErrorText bounds the part of an error's text that makes its kind.
	maxErrorText = 160
	// otherErrors is the kind of errors that came after the last place was taken.
	otherErrors = "other"
	// neverStarted is the kind of operations that an open loop had due and never sent.
	neverStarted = "never sent: the servers are slower than the offered rate, or there are too few clients for it"
)

// errorKind returns code and text of an error.
func errorKind(err error) string {
	code, text := codes.Unknown, err.Error()
	if s, ok := status.FromError(err); ok {
		code, text = s.Code(), s.Message()
	} else if errors.Is(err, context.DeadlineExceeded) {
		code = codes.DeadlineExceeded
	}
	text, _, _ = strings.Cut(text, "\n")
	if len(text) > maxErrorText {
		text = text[:maxErrorText]
	}
	return code.String() + ": " + strings.ToValidUTF8(text, "?")
}

// refused says whether an error means that a put was certainly not applied. All other
// errors leave its fate unknown.
func refused(err error) bool {
	switch status.Code(err) {
	case codes.InvalidArgument, codes.NotFound, codes.PermissionDenied, codes.Unauthenticated,
		codes.ResourceExhausted, codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented:
		return true
	default:
		return false
	}
}

// errorTally counts errors by kind.
type errorTally struct {
	mu    sync.Mutex
	kinds map[string]int64
	count int64
}

func (t *errorTally) add(kind string, n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.kinds == nil {
		t.kinds = map[string]int64{}
	}
	if _, known := t.kinds[kind]; !known && len(t.kinds) >= maxErrorKinds {
		kind = otherErrors
	}
	t.kinds[kind] += n
	t.count += n
}

// all returns the counts by kind.
func (t *errorTally) all() (map[string]int64, int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.kinds), t.count
}
