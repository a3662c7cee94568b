package target

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/skeindb/skein/clock"
)

const (
	// partBytes is the size of a part of a large file, and what a Put holds in memory. S3
	// wants at least 5 MiB.
	partBytes = 8 << 20
	// tries is how often a request is made in vain before it counts as failed. The
	// library's pauses grow to a second, so a service may be away for about ten.
	tries = 12
	// retryPause and maxRetryPause are those between the tries of a Get that was cut.
	retryPause    = 200 * time.Millisecond
	maxRetryPause = 5 * time.Second
	// writerKey is the metadata in which a file's writer finds itself again.
	writerKey = "Skein-Writer"
	// abortTimeout bounds the attempt to remove the parts of a failed upload.
	abortTimeout = 10 * time.Second
)

type s3Options struct {
	bucket, prefix, endpoint, region string
	secure, pathStyle                bool
	clock                            clock.Clock
}

// bucket is a Target in an S3 service.
type bucket struct {
	o    s3Options
	core minio.Core
}

func openS3(o s3Options) (*bucket, error) {
	lookup := minio.BucketLookupAuto
	if o.pathStyle {
		lookup = minio.BucketLookupPath
	}
	if o.region == "" {
		o.region = os.Getenv("AWS_REGION")
	}
	client, err := minio.NewCore(o.endpoint, &minio.Options{
		Creds: credentials.NewChainCredentials([]credentials.Provider{
			&credentials.EnvAWS{}, &credentials.FileAWSCredentials{}, &credentials.IAM{},
		}),
		Secure: o.secure, Region: o.region, BucketLookup: lookup, MaxRetries: tries,
	})
	if err != nil {
		return nil, fmt.Errorf("target s3://%s: %w", o.bucket, err)
	}
	return &bucket{o: o, core: *client}, nil
}

// String implements Target.
func (b *bucket) String() string {
	return fmt.Sprintf("s3://%s/%s at %s", b.o.bucket, b.o.prefix, b.o.endpoint)
}

// refused translates the service's error.
func (b *bucket) refused(op, name string, err error) error {
	var r minio.ErrorResponse
	if errors.As(err, &r) {
		switch {
		case r.Code == minio.NoSuchKey || op == "get" && r.StatusCode == http.StatusNotFound && r.Code != minio.NoSuchBucket:
			err = ErrNotFound
		case r.StatusCode == http.StatusPreconditionFailed:
			err = ErrExists
		case r.Code == minio.NoSuchBucket:
			err = fmt.Errorf("%w: create the bucket first", err)
		case r.StatusCode == http.StatusForbidden:
			err = fmt.Errorf("%w (%s): check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and their rights", err, r.Code)
		}
	}
	return failed(op, b, name, err)
}

// Put implements Target. A small file is one request, a larger one several parts. The last
// request of either fails if the name is taken.
func (b *bucket) Put(ctx context.Context, name string, r io.Reader) error {
	if err := checkName(name); err != nil {
		return failed("put", b, name, err)
	}
	u := upload{b: b, key: b.o.prefix + name, writer: rand.Text(), r: contextReader{ctx, r}, buf: make([]byte, partBytes)}
	n, err := io.ReadFull(u.r, u.buf)
	switch {
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		err = u.whole(ctx, u.buf[:n])
	case err == nil:
		err = u.inParts(ctx)
	}
	if err != nil {
		return b.refused("put", name, err)
	}
	return nil
}

// upload is one Put.
type upload struct {
	b           *bucket
	key, writer string
	r           io.Reader
	buf         []byte
}

func (u *upload) options(last bool) minio.PutObjectOptions {
	o := minio.PutObjectOptions{ContentType: "application/octet-stream"}
	o.UserMetadata = map[string]string{writerKey: u.writer}
	if last {
		o.SetMatchETagExcept("*")
	}
	return o
}

func (u *upload) whole(ctx context.Context, data []byte) error {
	sum := sha256.Sum256(data)
	_, err := u.b.core.PutObject(ctx, u.b.o.bucket, u.key, bytes.NewReader(data), int64(len(data)), "", hex.EncodeToString(sum[:]), u.options(true))
	return u.settle(ctx, err)
}

// inParts uploads the part in the buffer and all that follow.
func (u *upload) inParts(ctx context.Context) (err error) {
	id, err := u.b.core.NewMultipartUpload(ctx, u.b.o.bucket, u.key, u.options(false))
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			// A service keeps, and bills, the parts of uploads that are never ended.
			ctx, cancel := clock.WithTimeout(context.WithoutCancel(ctx), u.b.o.clock, abortTimeout)
			defer cancel()
			_ = u.b.core.AbortMultipartUpload(ctx, u.b.o.bucket, u.key, id)
		}
	}()
	var parts []minio.CompletePart
	for n := len(u.buf); n > 0; {
		sum := sha256.Sum256(u.buf[:n])
		p, err := u.b.core.PutObjectPart(ctx, u.b.o.bucket, u.key, id, len(parts)+1, bytes.NewReader(u.buf[:n]), int64(n),
			minio.PutObjectPartOptions{Sha256Hex: hex.EncodeToString(sum[:])})
		if err != nil {
			return err
		}
		parts = append(parts, minio.CompletePart{PartNumber: p.PartNumber, ETag: p.ETag})
		if n, err = io.ReadFull(u.r, u.buf); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return err
		}
	}
	_, err = u.b.core.CompleteMultipartUpload(ctx, u.b.o.bucket, u.key, id, parts, u.completion())
	return u.settle(ctx, err)
}

// completion has the condition alone: the rest was said when the upload began.
func (u *upload) completion() minio.PutObjectOptions {
	var o minio.PutObjectOptions
	o.SetMatchETagExcept("*")
	return o
}

// settle finds out what became of the last request if its answer is an error. A request whose
// answer was lost has been repeated by the library, and then found the file that it made.
func (u *upload) settle(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	info, statErr := u.b.core.StatObject(ctx, u.b.o.bucket, u.key, minio.StatObjectOptions{})
	switch {
	case statErr != nil:
		return err
	case info.UserMetadata[writerKey] == u.writer:
		return nil
	default:
		return ErrExists
	}
}

// Get implements Target.
func (b *bucket) Get(ctx context.Context, name string, offsetBytes int64) (io.ReadCloser, error) {
	if err := checkName(name); err != nil {
		return nil, failed("get", b, name, err)
	}
	d := &download{ctx: ctx, b: b, name: name, at: offsetBytes}
	if err := d.open(); err != nil {
		return nil, b.refused("get", name, err)
	}
	return d, nil
}

// download is a Get that goes on after its connection was cut.
type download struct {
	ctx  context.Context
	b    *bucket
	name string
	at   int64
	// etag is that of the first answer: the file stays the same one.
	etag string
	body io.ReadCloser
}

func (d *download) open() error {
	var o minio.GetObjectOptions
	if d.at > 0 {
		if err := o.SetRange(d.at, 0); err != nil {
			return err
		}
	}
	if d.etag != "" {
		if err := o.SetMatchETag(d.etag); err != nil {
			return err
		}
	}
	body, info, _, err := d.b.core.GetObject(d.ctx, d.b.o.bucket, d.b.o.prefix+d.name, o)
	if err != nil {
		return err
	}
	d.body, d.etag = body, info.ETag
	return nil
}

// Read implements io.Reader.
func (d *download) Read(p []byte) (n int, err error) {
	pause := retryPause
	for try := 0; ; try++ {
		if d.body != nil {
			if n, err = d.body.Read(p); n > 0 || err == nil || errors.Is(err, io.EOF) {
				d.at += int64(n)
				if n > 0 && !errors.Is(err, io.EOF) {
					err = nil // an error comes again
				}
				return n, err
			}
			_ = d.body.Close()
			d.body = nil
		}
		if d.ctx.Err() != nil {
			return 0, d.b.refused("get", d.name, context.Cause(d.ctx))
		}
		if try >= tries {
			return 0, d.b.refused("get", d.name, fmt.Errorf("cut %d times at byte %d: %w", try, d.at, err))
		}
		if try > 0 {
			if err := clock.Sleep(d.ctx, d.b.o.clock, pause); err != nil {
				return 0, d.b.refused("get", d.name, err)
			}
			pause = min(2*pause, maxRetryPause)
		}
		// The library has repeated what can be repeated: an error of open is final.
		if err := d.open(); err != nil {
			return 0, d.b.refused("get", d.name, fmt.Errorf("at byte %d: %w", d.at, err))
		}
	}
}

// Close implements io.Closer.
func (d *download) Close() error {
	if d.body == nil {
		return nil
	}
	return d.body.Close()
}

// List implements Target.
func (b *bucket) List(ctx context.Context, folder string) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		if err := checkFolder(folder); err != nil {
			yield(Object{}, failed("list", b, folder, err))
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		for o := range b.core.ListObjectsIter(ctx, b.o.bucket, minio.ListObjectsOptions{Prefix: b.o.prefix + folder, Recursive: true}) {
			if o.Err != nil {
				yield(Object{}, b.refused("list", folder, o.Err))
				return
			}
			if strings.HasSuffix(o.Key, "/") {
				continue // a folder that a console has made
			}
			if !yield(Object{Name: strings.TrimPrefix(o.Key, b.o.prefix), Bytes: o.Size, Modified: o.LastModified}, nil) {
				return
			}
		}
		if ctx.Err() != nil {
			yield(Object{}, b.refused("list", folder, context.Cause(ctx)))
		}
	}
}

// Delete implements Target.
func (b *bucket) Delete(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return failed("delete", b, name, err)
	}
	if err := b.core.RemoveObject(ctx, b.o.bucket, b.o.prefix+name, minio.RemoveObjectOptions{}); err != nil {
		return b.refused("delete", name, err)
	}
	return nil
}
