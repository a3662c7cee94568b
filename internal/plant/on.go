//go:build planted

package plant

import (
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
)

var now atomic.Uint32

// Variable is the environment variable by which a rig that starts processes of a planted
// build names the bug, by its number.
const Variable = "SKEIN_PLANT"

func init() {
	text := os.Getenv(Variable)
	if text == "" {
		return
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		panic(fmt.Sprintf("plant: %s: %v", Variable, err))
	}
	Set(Bug(n))
}

// Is says whether the bug is planted.
func Is(b Bug) bool { return Bug(now.Load()) == b }

// Set plants a bug in place of the one before.
func Set(b Bug) { now.Store(uint32(b)) }
