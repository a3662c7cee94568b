package main

import (
	"crypto/x509"
	"os"
	"os/exec"
	"testing"
)

// Where the machine has no certificates of authorities, as in an image FROM scratch, the program has its own: a backup
// goes to a bucket over https. Where it has some, they win.
func TestRootsWithoutTheMachines(t *testing.T) {
	const own = "SKEIN_TEST_ROOTS"
	if os.Getenv(own) != "" {
		pool, err := x509.SystemCertPool()
		if err != nil || pool.Equal(x509.NewCertPool()) {
			t.Errorf("nobody is trusted: %v", err)
		}
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// Roots are read once in a process.
	c := exec.CommandContext(t.Context(), self, "-test.run=^TestRootsWithoutTheMachines$")
	c.Env = append(os.Environ(), own+"=1", "SSL_CERT_FILE=/nonexistent", "SSL_CERT_DIR=/nonexistent")
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
