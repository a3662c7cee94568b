// Package target is where the files of backups lie: a folder (file:///…) or a bucket of an
// S3 service (s3://…). It knows names and bytes, and not what is in them. Credentials never
// enter a node: only the command line opens a Target.
//
// A file is written once and never changed. Put makes it appear whole and durable, or not at
// all, and of two writers of one name one gets ErrExists. A service that answers 503 or cuts a
// connection is asked again with growing pauses; a Get that is cut goes on where it was. What
// stays refused is an error with the operation and the file's name.
//
// # Files
//
//	target.go   Target, Open
//	file.go     a folder
//	s3.go       a bucket
//	names.go    names and errors
package target
