package config

import "strings"

// Nearest returns the one of some names that a mistyped word most likely means, and "" if none is near: at most one
// letter differs, or a third of a longer word. Of names that are equally near the first one counts.
func Nearest(word string, names []string) string {
	best, least := "", max(1, len(word)/3)+1
	for _, n := range names {
		// A word of two letters is two changes away from every other one.
		if d := distance(strings.ToLower(word), strings.ToLower(n)); d < least && d < len(word) {
			best, least = n, d
		}
	}
	return best
}

// distance is how many letters have to be inserted, left out, replaced, or exchanged with the next one.
func distance(a, b string) int {
	before, last, now := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range now {
		now[j] = j
	}
	for i := range len(a) {
		before, last, now = last, now, before
		now[0] = i + 1
		for j := range len(b) {
			replaced := last[j]
			if a[i] != b[j] {
				replaced++
			}
			now[j+1] = min(replaced, last[j+1]+1, now[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				now[j+1] = min(now[j+1], before[j-1]+1)
			}
		}
	}
	return now[len(b)]
}
