package keyspace

import (
	"context"
	"testing"
)

// A context has the permit that was put into it last, also beneath others. One without a permit says so.
func TestPermitsOfContexts(t *testing.T) {
	type other struct{}
	if p, ok := PermitOf(context.WithValue(t.Context(), other{}, 1)); ok || p != Internal {
		t.Errorf("a permit that nobody has given: %d, %v", p, ok)
	}
	ctx := WithPermit(context.WithValue(t.Context(), other{}, 1), PermitAt(7))
	ctx, cancel := context.WithCancel(ctx)
	ctx = context.WithValue(ctx, other{}, 2)
	if p, ok := PermitOf(ctx); !ok || p != PermitAt(7) || ctx.Value(other{}) != 2 {
		t.Errorf("%d, %v", p, ok)
	}
	inner := WithPermit(ctx, Internal)
	if p, ok := PermitOf(inner); !ok || p != Internal || inner.Value(other{}) != 2 {
		t.Errorf("the cluster's own work: %d, %v", p, ok)
	}
	cancel()
	if inner.Err() == nil {
		t.Error("it outlives its parent")
	}
	if n := testing.AllocsPerRun(100, func() { _, _ = PermitOf(inner) }); n > 0 {
		t.Errorf("to look takes %v allocations", n)
	}
}
