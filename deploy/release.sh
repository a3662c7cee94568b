#!/bin/sh
# Makes what is published for one architecture, in the directory $1: the binary, a Debian package, the root of the image,
# and the SBOM. The same commit gives the same bytes: the Go is go.mod's toolchain, times are those of the commit, and no path of
# this machine or C compiler is in them. ARCH is Go's name of the architecture.
set -eu
cd "$(dirname "$0")/.."

DIST=$(realpath -m "$1")
GOTOOLCHAIN=$(go mod edit -json | sed -n 's/.*"Toolchain": "\(.*\)".*/\1/p')
: "${GOTOOLCHAIN:?go.mod names no toolchain}"
export GOTOOLCHAIN
ARCH=${ARCH:-$(go env GOARCH)}
VERSION=$(sed -n 's/.*SkeinVersion = "\(.*\)"/\1/p' etcdapi/version.go)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export DIST ARCH VERSION SOURCE_DATE_EPOCH
export LC_ALL=C TZ=UTC

rm -rf "$DIST"
mkdir -p "$DIST"
program() { CGO_ENABLED=0 GOOS=linux GOARCH=$ARCH go build -C "$2" -trimpath -buildvcs=true -ldflags='-s -w' -o "$DIST/$1" .; }
tools=$DIST/tools # the SBOM has the hash of its tool
mkdir "$tools"
CGO_ENABLED=0 GOFLAGS='' go build -modfile=deploy/tools/go.mod -trimpath -o "$tools" tool
program skein cmd/skein
program skein-grpc-proxy deploy/grpcproxy

# The root of the image.
root=$DIST/root
mkdir -p "$root/usr/local/bin" "$root/data" "$root/tmp"
cp "$DIST/skein" "$DIST/skein-grpc-proxy" "$root/usr/local/bin"
ln -s skein "$root/usr/local/bin/etcd"
ln -s skein "$root/usr/local/bin/etcdctl"
chmod 755 "$root" "$root/usr" "$root/usr/local" "$root/usr/local/bin" "$root"/usr/local/bin/skein*
chmod 700 "$root/data" "$root/tmp"
pack() { tar -C "$root" --format=gnu --sort=name --mtime="@$SOURCE_DATE_EPOCH" --numeric-owner "$@"; }
pack --owner=0 --group=0 -cf "$DIST/root.tar" usr
pack --owner=65532 --group=65532 -rf "$DIST/root.tar" data tmp
rm -r "$root"
cp deploy/docker/Dockerfile "$DIST/Dockerfile"

printf 'skein (%s-1) unstable; urgency=medium\n\n  * See the commits of the release.\n\n -- Skein developers <skeindb@users.noreply.github.com>  %s\n' \
	"$VERSION" "$(date -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9n >"$DIST/changelog.Debian.gz"
"$tools/nfpm" package --config deploy/deb/nfpm.yaml --packager deb --target "$DIST/skein_${VERSION}_$ARCH.deb"
rm "$DIST/changelog.Debian.gz"

for name in skein skein-grpc-proxy; do
	"$tools/cyclonedx-gomod" bin -json -noserial -notimestamp -version "$VERSION" -output "$DIST/$name.cdx.json" "$DIST/$name"
done
rm -r "$tools"
(cd "$DIST" && sha256sum skein skein-grpc-proxy root.tar skein_*.deb *.cdx.json >SHA256SUMS)
