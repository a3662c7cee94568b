package auth

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/skeindb/skein/clock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testTime = clock.Time(time.Hour)

// fixedClock stands still.
type fixedClock struct{ clock.Clock }

func (fixedClock) Now() clock.Time { return testTime }
func (fixedClock) Wall() time.Time { return time.Unix(1e9, 0) }
