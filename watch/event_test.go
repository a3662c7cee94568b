package watch

import (
	"testing"

	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/shard"
)

// An event that is kept holds itself alone, not the message that brought it beside
// many others.
func TestEventsOwnTheirMemory(t *testing.T) {
	msg := []byte("....keyvalueolder....")
	e := newEvent(&shard.Event{
		Version: mvcc.Version{Key: msg[4:7], Value: msg[7:12], Mod: 5, Create: 3, Version: 2},
		Looked:  true, Prev: &mvcc.Version{Key: msg[4:7], Value: msg[12:17], Mod: 3, Create: 3, Version: 1},
	})
	clear(msg)
	if kv, prev := e.plain.Kv, e.whole.PrevKv; string(kv.Key) != "key" || string(kv.Value) != "value" ||
		string(prev.Key) != "key" || string(prev.Value) != "older" {
		t.Errorf("%v before %v", prev, kv)
	}
}
