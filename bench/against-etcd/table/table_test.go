package table

import (
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	var out strings.Builder
	tab := New("what", "µs", "ratio")
	tab.Add("a put", "1000", "1.2")
	tab.Add("half a row", "7")
	tab.Write(&out, "A caption")
	const want = `
A caption

| what       |   µs | ratio |
| ---------- | ---: | ----: |
| a put      | 1000 |   1.2 |
| half a row |    7 |       |
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestSpread(t *testing.T) {
	for _, c := range []struct {
		a, b []float64
		want string
	}{
		{[]float64{2, 3, 8}, []float64{1, 1, 2}, "3.00 (2.00 to 4.00)"},
		{[]float64{1, 2}, []float64{2, 2}, "0.75 (0.50 to 1.00)"},
		{[]float64{1, 2}, []float64{0, 4}, "0.50 (0.50 to 0.50)"}, // nothing to divide by
		{[]float64{1}, nil, "–"},
	} {
		if got := Spread(c.a, c.b); got != c.want {
			t.Errorf("Spread(%v, %v) = %q, want %q", c.a, c.b, got, c.want)
		}
	}
}
