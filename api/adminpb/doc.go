// Package adminpb is the generated code of admin.proto: Skein's admin service and
// its messages. go generate in package api makes it anew; adminapi serves and
// calls it.
package adminpb
