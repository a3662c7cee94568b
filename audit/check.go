package audit

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Result is what Check has found in one file.
type Result struct {
	Lines       int
	First, Last time.Time
	// Begins is the hash that the first line has of the line before: empty where the log began, else that of the last
	// line of the file before. Hash is that of the last line.
	Begins, Hash string
	// Torn are the numbers of lines that a crash has cut short.
	Torn []int
}

// Check reads an audit log, and returns an error that names the first line that does not follow the one before it.
func Check(r io.Reader) (res Result, err error) {
	in := bufio.NewReaderSize(r, maxLine)
	var torn error // what is wrong with the line before, which only a crash excuses
	for {
		text, err := in.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			return res, fmt.Errorf("line %d has more than %d bytes: the log writes no such line", res.Lines+1, maxLine)
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return res, fmt.Errorf("read line %d: %w", res.Lines+1, err)
		}
		if len(text) == 0 {
			return res, torn
		}
		whole := err == nil
		text = bytes.TrimSuffix(text, []byte("\n"))
		res.Lines++
		l, bad := parse(text)
		switch {
		case bad != nil && torn != nil:
			return res, torn
		case bad != nil:
			torn = fmt.Errorf("line %d is no entry: %w", res.Lines, bad)
			res.Torn = append(res.Torn, res.Lines)
			if res.Lines == 1 {
				return res, torn // a file begins with a whole line, whatever happens
			}
		case res.Lines > 1 && l.Prev != res.Hash:
			return res, fmt.Errorf("line %d does not follow line %d: it names %q as the hash of the line before, which is %s. A line was removed, added or changed", res.Lines, res.Lines-1, l.Prev, res.Hash)
		case torn != nil && l.Method != methodStart:
			return res, torn // no crash: the same process went on
		default:
			torn = nil
			if res.Lines == 1 {
				res.Begins, res.First = l.Prev, l.Time
			}
			res.Last = l.Time
		}
		if !whole && torn == nil {
			torn = fmt.Errorf("line %d has no end: it was cut short, or is being written", res.Lines)
		}
		res.Hash = hashOf(text)
	}
}

func parse(text []byte) (l line, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		return l, err
	}
	if d.More() {
		return l, errors.New("there is something behind it")
	}
	if l.Method == "" || l.Time.IsZero() {
		return l, errors.New("it has no time or no method")
	}
	return l, nil
}
