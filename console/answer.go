package console

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/adminpb"
)

// packFrom is the size from which an answer is packed: smaller ones cost less as they are.
const packFrom = 8 << 10

func send(w http.ResponseWriter, r *http.Request, b []byte) {
	if len(b) < packFrom || !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		_, _ = w.Write(b) // a reader who is gone
		return
	}
	w.Header().Set("Content-Encoding", "gzip")
	packed, _ := gzip.NewWriterLevel(w, gzip.BestSpeed) // the level is valid
	_, _ = packed.Write(b)                              // as above
	_ = packed.Close()
}

// failure is the answer to a request that has failed, and what to do next.
type failure struct {
	Error string `json:"error"`
	Next  string `json:"next,omitempty"`
	// Login says that the sender has to log in, or to log in anew.
	Login bool `json:"login,omitempty"`
}

func fail(w http.ResponseWriter, code int, f failure) {
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(f) // a reader who is gone
}

// badRequest is an error of a request that only somebody who writes requests by hand can send.
type badRequest struct{ what string }

// Error implements error.
func (b badRequest) Error() string { return b.what }

// failureOf words an error of a service, in its two halves where it has them.
func failureOf(err error) (int, failure) {
	if bad := (badRequest{}); errors.As(err, &bad) {
		return http.StatusBadRequest, failure{Error: bad.what}
	}
	st := status.Convert(err)
	f := failure{Error: st.Message()}
	for _, d := range st.Details() {
		if r, ok := d.(*adminpb.Refusal); ok {
			f.Error, f.Next = r.GetReason(), r.GetNextStep()
		}
	}
	switch {
	case needsLogin(err):
		f.Login = true
		return http.StatusUnauthorized, f
	case errors.Is(err, context.DeadlineExceeded):
		f.Error, f.Next = "the node did not answer in time", "try again; if it stays so, a quorum may be missing"
		return http.StatusServiceUnavailable, f
	}
	switch st.Code() {
	case codes.PermissionDenied:
		return http.StatusForbidden, f
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted:
		return http.StatusServiceUnavailable, f
	default:
		return http.StatusBadRequest, f
	}
}

// needsLogin says whether a call was refused because it names no user, or by a token that counts no more.
func needsLogin(err error) bool {
	switch rpctypes.Error(err) {
	case rpctypes.ErrUserEmpty, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision: //nolint:errorlint // etcd's values, which Error returns unwrapped
		return true
	}
	return false
}

// messageJSON writes a message as the commands' -w json do: names as in the .proto files.
func messageJSON(m proto.Message) json.RawMessage {
	b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		panic(fmt.Sprintf("console: a service has answered with what is no message: %v", err))
	}
	return b
}

// read reads a request that is no message.
func read(body []byte, into any) error {
	if err := json.Unmarshal(orEmpty(body), into); err != nil {
		return badRequest{err.Error()}
	}
	return nil
}

// orEmpty takes an empty body for an empty object.
func orEmpty(body []byte) []byte {
	if len(body) == 0 {
		return []byte("{}")
	}
	return body
}
