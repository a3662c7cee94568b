package fsm

import (
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/kverror"
)

// The first byte after the version of every answer on the bus.
const (
	AnswerOK    = 0
	answerError = 1
	// AnswerOfHandler is another good answer, in a form that its handler knows.
	AnswerOfHandler = 2
)

// EncodeError is the answer of a handler that refuses.
func EncodeError(err error) []byte {
	return kverror.Append([]byte{FormatVersion, answerError}, kverror.Of(err))
}

// AnswerBody returns a reader of what follows a good answer's head, or the error
// that the handler answered.
func AnswerBody(p []byte) (*Reader, error) {
	r, _, err := AnswerBodies(p, AnswerOK)
	return r, err
}

// AnswerBodies is AnswerBody for answers that have another good form too. It returns which one this is.
func AnswerBodies(p []byte, other byte) (*Reader, byte, error) {
	r := &Reader{wire.NewReader(p)}
	r.Version()
	switch code := r.Byte(); {
	case !r.OK():
		return nil, 0, fmt.Errorf("placement: %w", r.Err())
	case code == AnswerOK || code == other:
		return r, code, nil
	case code == answerError:
		e, err := kverror.Decode(r.Peek())
		if err != nil {
			return nil, 0, fmt.Errorf("decode refusal: %w", err)
		}
		return nil, 0, e
	default:
		return nil, 0, fmt.Errorf("placement: answer of kind %d", code)
	}
}
