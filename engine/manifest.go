package engine

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Pebble's manifest is a row of chunks in blocks. A chunk is a checksum (4 bytes), a length (2), a type
// (1) and the payload, and does not cross a block. A record is one chunk (type 1), or a first one (2),
// others, and a last one.
const (
	manifestBlock  = 32 << 10
	manifestHeader = 7
)

// checkManifest returns an error if a chunk of the store's manifest is damaged and another record
// follows. Pebble takes the first bad chunk for the end that a crash has torn. It would open an older
// state, and delete the tables that came later. Each record is durable before the next one is written.
// So a crash tears the last record alone, though perhaps its first chunk and not its last.
func checkManifest(fs vfs.FS, dir string) error {
	names, err := fs.List(dir)
	if err != nil {
		return fmt.Errorf("engine: list %s: %w", dir, err)
	}
	marker, current := "", ""
	for _, name := range names {
		// The newest marker has the highest number, which has a fixed length.
		if rest, ok := strings.CutPrefix(name, "marker.manifest."); ok && name > marker {
			_, manifest, _ := strings.Cut(rest, ".")
			marker, current = name, manifest
		}
	}
	if current == "" {
		return nil // a new store, or Pebble says what is missing
	}
	path := fs.PathJoin(dir, current)
	f, err := fs.Open(path)
	if err != nil {
		return fmt.Errorf("engine: %w", err)
	}
	whole, err := io.ReadAll(f)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("engine: read %s: %w", path, err)
	}
	at := 0
	for at < len(whole) {
		if left := manifestBlock - at%manifestBlock; left < manifestHeader {
			at += left
			continue
		}
		n := manifestChunk(whole, at)
		if n == 0 {
			break
		}
		at += n
	}
	for next := at + 1; next < len(whole); next++ {
		if manifestChunk(whole, next) > 0 && whole[next+6] <= 2 {
			return fmt.Errorf("engine: %s is damaged at offset %d, and goes on at %d: %w", path, at, next, pebble.ErrCorruption)
		}
	}
	return nil
}

// manifestChunk returns the length of the whole chunk at the offset, 0 if there is none.
func manifestChunk(whole []byte, at int) int {
	end := min(len(whole), at-at%manifestBlock+manifestBlock)
	if end-at < manifestHeader {
		return 0
	}
	n := manifestHeader + int(binary.LittleEndian.Uint16(whole[at+4:]))
	if whole[at+6] == 0 || n > end-at {
		return 0
	}
	sum := crc32.Checksum(whole[at+6:at+n], crc32.MakeTable(crc32.Castagnoli))
	if sum = (sum>>15 | sum<<17) + 0xa282ead8; sum != binary.LittleEndian.Uint32(whole[at:]) {
		return 0
	}
	return n
}
