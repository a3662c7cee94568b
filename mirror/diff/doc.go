// Package diff compares two stores key by key: etcds, Skeins, or one of each.
//
// It reads each side at one revision, in pages of 1,000 keys, and joins the two sorted
// streams. So it needs memory for two pages, whatever the size of the stores, and writes
// that go on meanwhile do not matter. A key is equal if its value, create revision, mod
// revision, version and lease are. Leases are equal if their ids and granted TTLs are.
//
// A difference is a result and not an error. An error says that a side could not be read:
// then nothing is known about the rest.
package diff
