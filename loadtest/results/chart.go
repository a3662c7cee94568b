package results

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// A chart's place, in the units of its picture.
const (
	chartWidth  = 720.0
	chartHeight = 260.0
	chartLeft   = 64.0
	chartRight  = 12.0
	chartTop    = 10.0
	chartBottom = 30.0
	// maxPoints is how many points a line has at most: more than the picture can show only make the file larger.
	maxPoints = 360
)

// chart is a picture of lines over one horizontal axis.
type chart struct {
	Title, Note    string
	Width, Height  float64
	Left, Right    float64 // the ends of the horizontal lines
	Top, Bottom    float64
	XTicks, YTicks []tick
	Lines          []line
	Hits           []hit
}

type tick struct {
	At   float64
	Text string
}

// line is one line; its class has the colour of its run.
type line struct {
	Run    int
	Dashed bool
	Path   string
}

// hit is a strip of the picture and the words that a pointer over it shows.
type hit struct {
	X, Width float64
	Text     string
}

// point has coordinates in the figures' own units.
type point struct{ x, y float64 }

// curve is the points of one line before they are drawn.
type curve struct {
	run    int
	name   string
	dashed bool
	points []point
}

// scale maps figures to places.
type scale struct {
	low, high float64 // of the figures
	from, to  float64 // of the places
	log       bool
}

func (s *scale) at(v float64) float64 {
	low, high := s.low, s.high
	if s.log {
		v, low, high = math.Log(max(v, s.low)), math.Log(low), math.Log(high)
	}
	if high <= low {
		return s.from
	}
	return s.from + (min(max(v, low), high)-low)/(high-low)*(s.to-s.from)
}

// plot is what a chart shows.
type plot struct {
	title, note string
	curves      []curve
	logarithmic bool   // the vertical axis
	xticks      []tick // of the horizontal axis, which begins at 0
	xhigh       float64
	label, name func(float64) string // of vertical and horizontal figures
}

// draw makes a chart, and nil if there is nothing to show.
func draw(p *plot) *chart {
	curves := slices.DeleteFunc(p.curves, func(c curve) bool { return len(c.points) == 0 })
	if len(curves) == 0 {
		return nil
	}
	low, high := math.Inf(1), 0.0
	for _, c := range curves {
		for _, at := range c.points {
			if at.y > 0 {
				low = min(low, at.y)
			}
			high = max(high, at.y)
		}
	}
	if high == 0 {
		low, high = 1, 1
	}
	c := &chart{
		Title: p.title, Note: p.note, Width: chartWidth, Height: chartHeight,
		Left: chartLeft, Right: chartWidth - chartRight, Top: chartTop, Bottom: chartHeight - chartBottom,
	}
	y := scale{from: c.Bottom, to: c.Top, log: p.logarithmic}
	var marks []float64
	if p.logarithmic {
		marks, y.low, y.high = logMarks(low, high)
	} else {
		marks, y.high = evenMarks(high)
	}
	for _, v := range marks {
		c.YTicks = append(c.YTicks, tick{round(y.at(v)), p.label(v)})
	}
	x := scale{high: p.xhigh, from: c.Left, to: c.Right}
	for _, t := range p.xticks {
		c.XTicks = append(c.XTicks, tick{round(x.at(t.At)), t.Text})
	}
	texts := map[float64][]string{}
	for _, one := range curves {
		var path strings.Builder
		for i, at := range one.points {
			verb := 'L'
			if i == 0 {
				verb = 'M'
			}
			fmt.Fprintf(&path, "%c%.1f %.1f", verb, x.at(at.x), y.at(at.y))
			texts[at.x] = append(texts[at.x], fmt.Sprintf("%s: %s", one.name, p.label(at.y)))
		}
		c.Lines = append(c.Lines, line{one.run, one.dashed, path.String()})
	}
	c.Hits = hits(texts, &x, p.name)
	return c
}

// hits divides the picture into strips around the points.
func hits(texts map[float64][]string, x *scale, name func(float64) string) (out []hit) {
	var at []float64
	for v := range texts {
		at = append(at, v)
	}
	slices.Sort(at)
	for i, v := range at {
		from, to := x.from, x.to
		if i > 0 {
			from = (x.at(at[i-1]) + x.at(v)) / 2
		}
		if i+1 < len(at) {
			to = (x.at(v) + x.at(at[i+1])) / 2
		}
		out = append(out, hit{round(from), round(to - from), name(v) + "\n" + strings.Join(texts[v], "\n")})
	}
	return out
}

func round(v float64) float64 { return math.Round(v*10) / 10 }

// logMarks returns the powers of ten around a span, with 2 and 5 between them where there are few.
func logMarks(low, high float64) (marks []float64, from, to float64) {
	from, to = math.Pow(10, math.Floor(math.Log10(low))), math.Pow(10, math.Ceil(math.Log10(high)))
	if to <= from {
		to = from * 10
	}
	for decade := from; decade <= to*1.001; decade *= 10 {
		for _, m := range []float64{1, 2, 5} {
			if v := decade * m; v <= to*1.001 && (m == 1 || to/from <= 1001) {
				marks = append(marks, v)
			}
		}
	}
	// At each end one mark beyond the figures is enough.
	for len(marks) > 2 && marks[1] <= low {
		marks = marks[1:]
	}
	for len(marks) > 2 && marks[len(marks)-2] >= high {
		marks = marks[:len(marks)-1]
	}
	return marks, marks[0], marks[len(marks)-1]
}

// evenMarks returns up to six round numbers from 0 on, the last of which is not below high.
func evenMarks(high float64) (marks []float64, to float64) {
	step := math.Pow(10, math.Floor(math.Log10(high)))
	for _, part := range []float64{0.2, 0.5, 1, 2} {
		if n := math.Ceil(high / (step * part)); n <= 5 || part == 2 {
			for i := range int(n) + 1 {
				marks = append(marks, float64(i)*step*part)
			}
			break
		}
	}
	return marks, marks[len(marks)-1]
}
