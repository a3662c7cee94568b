package loadtest

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
)

// opID names an operation of a run: the client in the upper 24 bits, its count in
// the lower 40. No two operations of a run share one, and none is 0.
type opID uint64

const opCountBits = 40

func makeOpID(client int, count uint64) opID { return opID(uint64(client)<<opCountBits | count) }

// stampBytes is the size of a value's stamp: run and operation, each 8 bytes
// big-endian.
const stampBytes = 16

// noiseOffsets is how many different tails values have.
const noiseOffsets = 4096

// values makes and recognises the values of one run. A value is its stamp, then random
// bytes that do not compress. One that is too short for a stamp is only random bytes
// and cannot be recognised.
type values struct {
	run   uint64
	size  int
	noise []byte // noiseOffsets + size bytes
}

func newValues(run uint64, size int) *values {
	v := &values{run: run, size: size, noise: make([]byte, noiseOffsets+size)}
	var seed [32]byte
	binary.BigEndian.PutUint64(seed[:], run)
	// ChaCha8.Read never fails.
	_, _ = rand.NewChaCha8(seed).Read(v.noise)
	return v
}

// tail returns the size bytes whose end, behind the stamp, depends on the operation.
func (v *values) tail(op opID) []byte {
	at := (uint64(op) ^ uint64(op)>>opCountBits) % noiseOffsets
	return v.noise[at : at+uint64(v.size)]
}

// put writes the value of an operation into dst, which has v.size bytes.
func (v *values) put(dst []byte, op opID) {
	copy(dst, v.tail(op))
	if v.size >= stampBytes {
		binary.BigEndian.PutUint64(dst, v.run)
		binary.BigEndian.PutUint64(dst[8:], uint64(op))
	}
}

// recognise returns the operation that wrote a value. ours is false if this run did not
// write it. intact is false if it did and a byte has changed since.
func (v *values) recognise(value []byte) (op opID, ours, intact bool) {
	if len(value) < stampBytes || binary.BigEndian.Uint64(value) != v.run {
		return 0, false, false
	}
	op = opID(binary.BigEndian.Uint64(value[8:]))
	intact = len(value) == v.size && bytes.Equal(value[stampBytes:], v.tail(op)[stampBytes:])
	return op, true, intact
}
