//go:build planted

package mutation

import (
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
)

var now atomic.Uint32

// Variable is the environment variable that selects the bug by its number. A rig sets
// it for processes that were built with the tag planted.
const Variable = "SKEIN_MUTATION"

func init() {
	text := os.Getenv(Variable)
	if text == "" {
		return
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		panic(fmt.Sprintf("mutation: %s: %v", Variable, err))
	}
	Set(Bug(n))
}

// Is reports whether the bug is the active one.
func Is(b Bug) bool { return Bug(now.Load()) == b }

// Set makes b the active bug, in place of the one before.
func Set(b Bug) { now.Store(uint32(b)) }
