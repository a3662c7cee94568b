// Command tools bundles the console's page: ui and third_party become dist. It is run by go generate in package console.
//
// The bundle is a function of these files and of the version of esbuild in go.mod, so it is in git, and CI makes it anew
// to see that it is the same. It refuses a library whose bytes are not those of third_party/SHA256SUMS.
package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/evanw/esbuild/pkg/api"
)

// Paths are relative to this module, where go generate runs it.
const (
	libraries = "../third_party"
	page      = "../ui"
	into      = "../dist"
)

// modules are the names by which the page imports the libraries.
var modules = map[string]string{
	"preact":               "preact/preact.mjs",
	"preact/hooks":         "preact/hooks.mjs",
	"@preact/signals":      "signals/signals.mjs",
	"@preact/signals-core": "signals/signals-core.mjs",
	"uplot":                "uplot/uPlot.esm.js",
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "console:", err)
		os.Exit(1) //nolint:forbidigo // this is main
	}
}

func run() error {
	if err := checkLibraries(); err != nil {
		return err
	}
	if err := os.RemoveAll(into); err != nil {
		return err
	}
	if err := bundle(); err != nil {
		return err
	}
	for _, name := range []string{"index.html", "icon.svg"} {
		b, err := os.ReadFile(filepath.Join(page, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(into, name), b, 0o644); err != nil {
			return err
		}
	}
	return writeLicences()
}

// writeLicences puts the libraries' licences beside the bundle, as they ask of each copy.
func writeLicences() error {
	var all strings.Builder
	for _, name := range []string{"preact", "signals", "uplot"} {
		b, err := os.ReadFile(filepath.Join(libraries, name, "LICENSE"))
		if err != nil {
			return err
		}
		fmt.Fprintf(&all, "%s\n\n%s\n\n", name, strings.TrimSpace(string(b)))
	}
	return os.WriteFile(filepath.Join(into, "licences.txt"), []byte(all.String()), 0o644)
}

// checkLibraries compares every file of the libraries with its checksum.
func checkLibraries() error {
	sums, err := os.ReadFile(filepath.Join(libraries, "SHA256SUMS"))
	if err != nil {
		return err
	}
	listed := map[string]bool{}
	for _, line := range strings.Split(strings.TrimSpace(string(sums)), "\n") {
		want, name, ok := strings.Cut(line, "  ")
		if !ok {
			return fmt.Errorf("SHA256SUMS: %q is no checksum and name", line)
		}
		b, err := os.ReadFile(filepath.Join(libraries, name))
		if err != nil {
			return err
		}
		if got := sha256.Sum256(b); hex.EncodeToString(got[:]) != want {
			return fmt.Errorf("%s is not what SHA256SUMS says", name)
		}
		listed[name] = true
	}
	for name, path := range modules {
		if !listed[path] {
			return fmt.Errorf("%s, which is %s, has no checksum", path, name)
		}
	}
	return nil
}

func bundle() error {
	libs, err := filepath.Abs(libraries)
	if err != nil {
		return err
	}
	result := api.Build(api.BuildOptions{
		EntryPointsAdvanced: []api.EntryPoint{
			{InputPath: filepath.Join(page, "main.jsx"), OutputPath: "app"},
			{InputPath: filepath.Join(page, "app.css"), OutputPath: "app"},
		},
		Outdir: into, Bundle: true, Write: true, LogLevel: api.LogLevelWarning,
		Format: api.FormatESModule, Target: api.ES2022, Charset: api.CharsetUTF8,
		MinifyWhitespace: true, MinifyIdentifiers: true, MinifySyntax: true,
		JSX: api.JSXTransform, JSXFactory: "h", JSXFragment: "Fragment",
		LegalComments: api.LegalCommentsEndOfFile,
		Plugins: []api.Plugin{{Name: "libraries", Setup: func(b api.PluginBuild) {
			b.OnResolve(api.OnResolveOptions{Filter: `^[^./]`}, func(a api.OnResolveArgs) (api.OnResolveResult, error) {
				if a.Kind == api.ResolveEntryPoint {
					return api.OnResolveResult{}, nil
				}
				path, ok := modules[a.Path]
				if !ok {
					return api.OnResolveResult{}, fmt.Errorf("%q is none of the libraries", a.Path)
				}
				return api.OnResolveResult{Path: filepath.Join(libs, path)}, nil
			})
		}}},
	})
	if len(result.Errors) > 0 {
		return errors.New("the page does not build")
	}
	return nil
}
