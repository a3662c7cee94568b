#!/bin/sh
# Makes what is published for one architecture, in the directory $1: the binary, the root of the image, and their
# checksums. The same commit gives the same bytes: times are those of the commit, and no path of this machine or C compiler
# is in them. ARCH is Go's name of the architecture.
set -eu
cd "$(dirname "$0")/.."

DIST=$(realpath -m "$1")
ARCH=${ARCH:-$(go env GOARCH)}
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export LC_ALL=C TZ=UTC

rm -rf "$DIST"
mkdir -p "$DIST"
CGO_ENABLED=0 GOOS=linux GOARCH=$ARCH go build -trimpath -buildvcs=true -ldflags='-s -w' -o "$DIST/skein" ./cmd/skein

# The root of the image.
root=$DIST/root
mkdir -p "$root/usr/local/bin" "$root/data" "$root/tmp"
cp "$DIST/skein" "$root/usr/local/bin"
ln -s skein "$root/usr/local/bin/etcd"
ln -s skein "$root/usr/local/bin/etcdctl"
chmod 755 "$root" "$root/usr" "$root/usr/local" "$root/usr/local/bin" "$root/usr/local/bin/skein"
chmod 700 "$root/data" "$root/tmp"
pack() { tar -C "$root" --format=gnu --sort=name --mtime="@$SOURCE_DATE_EPOCH" --numeric-owner "$@"; }
pack --owner=0 --group=0 -cf "$DIST/root.tar" usr
pack --owner=65532 --group=65532 -rf "$DIST/root.tar" data tmp
rm -r "$root"
cp deploy/docker/Dockerfile "$DIST/Dockerfile"

(cd "$DIST" && sha256sum skein root.tar >SHA256SUMS)
