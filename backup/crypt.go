package backup

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"filippo.io/age"
)

// Errors of keys, to be tested with errors.Is.
var (
	// ErrNoIdentity says that a file is encrypted and that no identity was given.
	ErrNoIdentity = errors.New("the file is encrypted: give the identity file of one of its recipients (--identity)")
	// ErrWrongIdentity says that no identity given is one of the file's recipients.
	ErrWrongIdentity = errors.New("the file is encrypted to other recipients than the identities given (--identity)")
)

// Keys encrypt and decrypt files of backups. The zero Keys write plain files.
type Keys struct {
	recipients []age.Recipient
	identities []age.Identity
}

// ParseKeys reads public recipients ("age1…") and, if it is not nil, an identity file as
// age-keygen writes it. With recipients all files are encrypted, manifests too. Only who has
// an identity can read them, or go on with a backup that was broken off.
func ParseKeys(recipients []string, identityFile io.Reader) (k Keys, err error) {
	for _, s := range recipients {
		rs, err := age.ParseRecipients(strings.NewReader(s))
		if err != nil || len(rs) != 1 {
			return Keys{}, fmt.Errorf("recipient %q: want a public key of age (age1…), as age-keygen prints it", s)
		}
		k.recipients = append(k.recipients, rs[0])
	}
	if identityFile != nil {
		// The error of the library may hold a line of the file.
		if k.identities, err = age.ParseIdentities(identityFile); err != nil {
			return Keys{}, errors.New("identity file: no identities of age (AGE-SECRET-KEY-1…), one a line, as age-keygen writes them")
		}
	}
	return k, nil
}

// encrypts says whether files are encrypted.
func (k *Keys) encrypts() bool { return len(k.recipients) > 0 }

type nopWriteCloser struct{ io.Writer }

func (nopWriteCloser) Close() error { return nil }

// seal returns a writer whose input arrives at w, encrypted if there are recipients. The
// Close does not close w.
func (k *Keys) seal(w io.Writer) (io.WriteCloser, error) {
	if !k.encrypts() {
		return nopWriteCloser{w}, nil
	}
	return age.Encrypt(w, k.recipients...)
}

// ageIntro begins every encrypted file.
const ageIntro = "age-encryption.org/v1\n"

// open returns what was written through seal.
func (k *Keys) open(r io.Reader) (io.Reader, error) {
	b := bufio.NewReaderSize(r, 64<<10)
	intro, err := b.Peek(len(ageIntro))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if !bytes.Equal(intro, []byte(ageIntro)) {
		return b, nil
	}
	if len(k.identities) == 0 {
		return nil, ErrNoIdentity
	}
	plain, err := age.Decrypt(b, k.identities...)
	var wrong *age.NoIdentityMatchError
	if errors.As(err, &wrong) {
		return nil, ErrWrongIdentity
	}
	if err != nil {
		return nil, fmt.Errorf("decrypt: %w", err)
	}
	return plain, nil
}
