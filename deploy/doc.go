// Package deploy tests what is published: units, the Debian package, the image and its compose file. Nothing imports it.
//
// With -release, which make packages sets, release.sh makes everything once for the tests that need it, and once more to
// compare the bytes. A test whose tool or right is missing says so and leaves itself out, or fails with SKEIN_NOTHING_LEFT_OUT.
package deploy
