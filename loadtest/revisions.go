package loadtest

import "math/bits"

// revisionSet is a set of revisions above its base, a bit for each.
type revisionSet struct {
	base  int64
	words []uint64
}

// maxRevisions bounds the distance of a set's revisions from its base, and so its memory, to half a GiB: a server's
// answer is not trusted.
const maxRevisions = 1 << 32

// add says whether the revision is new. One out of bounds is not.
func (s *revisionSet) add(revision int64) bool {
	at := revision - s.base
	if at < 0 || at >= maxRevisions {
		return false
	}
	word, bit := at/64, uint64(1)<<(at%64)
	if n := word + 1 - int64(len(s.words)); n > 0 {
		s.words = append(s.words, make([]uint64, n)...)
	}
	if s.words[word]&bit != 0 {
		return false
	}
	s.words[word] |= bit
	return true
}

func (s *revisionSet) has(revision int64) bool {
	at := revision - s.base
	return at >= 0 && at/64 < int64(len(s.words)) && s.words[at/64]&(1<<(at%64)) != 0
}

// without returns how many revisions are not in another set with the same base, and the first of them.
func (s *revisionSet) without(other *revisionSet) (count, first int64) {
	for i, word := range s.words {
		if i < len(other.words) {
			word &^= other.words[i]
		}
		if word != 0 && count == 0 {
			first = s.base + int64(i)*64 + int64(bits.TrailingZeros64(word))
		}
		count += int64(bits.OnesCount64(word))
	}
	return count, first
}
