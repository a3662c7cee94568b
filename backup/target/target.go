package target

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/skeindb/skein/clock"
)

// An Object is a file as List tells of it.
type Object struct {
	Name     string
	Bytes    int64
	Modified time.Time
}

// A Target keeps files under names like "a/b/c". Its methods may be called concurrently.
type Target interface {
	// Put makes a file of all that r has. It fails with ErrExists if there is one. It holds
	// at most 8 MiB of the file in memory.
	Put(ctx context.Context, name string, r io.Reader) error
	// Get returns the file from the offset on; the caller closes it. It fails with
	// ErrNotFound if there is none.
	Get(ctx context.Context, name string, offsetBytes int64) (io.ReadCloser, error)
	// List returns all files whose names begin with the folder, which is empty or ends in
	// "/", in no order.
	List(ctx context.Context, folder string) iter.Seq2[Object, error]
	// Delete removes a file. It is no error if there is none.
	Delete(ctx context.Context, name string) error
	// String is the target's URL, without secrets.
	String() string
}

// Open opens the target of a URL: file:///folder, or
// s3://bucket/prefix?endpoint=URL&region=NAME&path-style=1. Without an endpoint it is
// Amazon's. Keys of S3 come from the environment (AWS_ACCESS_KEY_ID, …), the shared
// credentials file, or the machine's role, in this order. A folder is made by the first Put;
// a bucket must be there.
func Open(rawURL string, c clock.Clock) (Target, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("target %q: %w", rawURL, err)
	}
	switch u.Scheme {
	case "file":
		if u.Host != "" || !filepath.IsAbs(u.Path) || u.RawQuery != "" {
			return nil, fmt.Errorf("target %q: want file:///FOLDER with an absolute folder", rawURL)
		}
		return openFolder(u.Path), nil
	case "s3":
		o, err := parseS3(u)
		if err != nil {
			return nil, fmt.Errorf("target %q: %w", rawURL, err)
		}
		o.clock = c
		return openS3(o)
	default:
		return nil, fmt.Errorf("target %q: want file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL&region=NAME&path-style=1", rawURL)
	}
}

func parseS3(u *url.URL) (o s3Options, err error) {
	if u.Host == "" || u.User != nil {
		return o, errors.New("want s3://BUCKET/PREFIX; keys come from the environment")
	}
	o = s3Options{bucket: u.Host, prefix: strings.Trim(u.Path, "/"), endpoint: "s3.amazonaws.com", secure: true}
	if o.prefix != "" {
		if err := checkName(o.prefix); err != nil {
			return o, err
		}
		o.prefix += "/"
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return o, err
	}
	for key, values := range query {
		value := values[0]
		switch key {
		case "endpoint":
			e, err := url.Parse(value)
			if err != nil || e.Scheme != "http" && e.Scheme != "https" || e.Host == "" || strings.Trim(e.Path, "/") != "" {
				return o, fmt.Errorf("endpoint %q: want http://HOST:PORT or https://HOST:PORT", value)
			}
			o.endpoint, o.secure = e.Host, e.Scheme == "https"
		case "region":
			o.region = value
		case "path-style":
			if o.pathStyle, err = strconv.ParseBool(value); err != nil {
				return o, fmt.Errorf("path-style %q: want 1 or 0", value)
			}
		default:
			return o, fmt.Errorf("unknown option %q: known are endpoint, region, path-style", key)
		}
	}
	return o, nil
}
