package shard

import "testing"

func FuzzAdminAnswer(f *testing.F) {
	f.Add([]byte("\x01\x00{}"))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = decodeAdminAnswer(b) })
}
