// Package prompt reads the user and password of a command: from its flags, or the password from a terminal.
package prompt

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// Login returns the user and the password that the flags --user and --password say: both are "" without any. User may
// be NAME:PASSWORD, but for a name with a password of its own. If the password is missing and in is a terminal, it is asked
// for there, on prompts, and not shown. variable is the one of the environment that holds --password, for errors.
func Login(user, password, variable string, in *os.File, prompts io.Writer) (name, secret string, err error) {
	if user == "" && password != "" {
		return "", "", errors.New("--password without a user: give --user")
	}
	if user == "" || password != "" {
		return user, password, nil
	}
	name, secret, given := strings.Cut(user, ":")
	if name != "" && !given && term.IsTerminal(int(in.Fd())) {
		fmt.Fprintf(prompts, "Password of %s: ", name)
		typed, err := term.ReadPassword(int(in.Fd()))
		fmt.Fprintln(prompts)
		if err != nil {
			return "", "", fmt.Errorf("read the password of %s from the terminal: %w", name, err)
		}
		secret = string(typed)
	}
	if name == "" || secret == "" {
		return "", "", fmt.Errorf("--user without a name or a password: give --user NAME:PASSWORD, or --user NAME at a terminal, or --user NAME and %s in the environment", variable)
	}
	return name, secret, nil
}
