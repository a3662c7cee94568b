// Package backup keeps the data of clusters outside of them: chains of backups in a target
// (package target), made of blocks of versions (package block). It knows no cluster. Who makes
// a backup brings the versions of a cut as a Source; who restores one takes the versions of a
// Plan.
//
// # A chain
//
// A chain is a full backup and those on top of it, each from the revision at which the one
// before ends:
//
//	full          versions        versions
//	[1, 100] <--- (100, 130] <--- (130, 155]
//
// A backup of kind Versions has everything in its interval, so any revision from 100 to 155
// can be restored. One of kind Tombstones has only the newest version of each key, so that it
// restores its end alone, but is smaller and does not need the history to be kept.
//
// The files of a backup lie in <cluster>/<chain>/<number>/ (docs/format/backup.md). The manifest
// comes last and makes the backup count. It has the hash of every segment and of the manifest
// before, so a chain is whole or is found not to be.
//
// # What if
//
//   - the writer dies: the draft and a record of each segment are in the target. Unfinished
//     returns them to another run, which reads what is missing. It needs a cut of the same
//     revision.
//   - two writers make the same backup: segments have random names, so neither disturbs the
//     other. Records and the manifest exist once; who comes second gets ErrTaken.
//   - two writers go on with one chain at different revisions: the number of the backup
//     and so the manifest is the same, and one gets ErrTaken.
//   - a file is damaged, is missing, or belongs to another backup: whoever reads it gets an
//     error with its name. Restored are the backups before it.
//   - the identity is wrong: ErrWrongIdentity, before anything else.
//   - a removal of old chains is broken off: manifests go before segments, so what is left of
//     a chain is shorter and whole.
//
// # Memory
//
// A backup takes about 16 MiB for each span that is read at once, a restore 1 MiB for each
// backup that is read at once, and both the manifests: about 400 bytes a segment.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	prune.go       removal of old chains
//	verify.go      is everything there, and as it was written
//	restore.go     the plan of a state, and its versions
//	create.go      drafts, and writing a backup
//	repository.go  what is in a target; its names
//	segment.go     files of blocks
//	manifest.go    the formats of manifests, drafts and records
//	crypt.go       encryption to public keys
//	limiter.go     the rate of a backup
package backup
