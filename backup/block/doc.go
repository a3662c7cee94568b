// Package block packs versions of keys into blocks: the form in which data enter and leave a
// cluster, on the wire and in the files of backups. It knows neither files nor streams, and it
// is older than any table of Pebble that a node can read: a backup outlives those.
//
// A block has at most MaxBytes of versions before it is packed, so nobody who reads one needs
// more memory than that. A version that is larger has a block of its own. Keys are
// front-coded, the whole is compressed with zstd and carries a CRC-32C. The bytes are in
// docs/format/backup.md.
//
// A Writer cuts versions into blocks. A Decoder reads the blocks of one stream and checks
// the order over their borders; Decode reads a single one. Both refuse what violates the
// model of package mvcc, so what they return may be stored. They never allocate what is
// only claimed.
//
// A Sum adds up what a set of versions is, in any order. Both ends of a transfer compare
// theirs.
package block
