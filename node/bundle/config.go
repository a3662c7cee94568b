package bundle

import (
	"fmt"
	"io"
	"net/url"
	"reflect"
	"strings"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/redact"
)

// writeConfig writes the fields of a configuration, one a line, as package config names them.
func writeConfig(w io.Writer, c *config.Config, keys *redact.Redactor) error {
	var b strings.Builder
	writeFields(&b, "", reflect.ValueOf(c).Elem(), keys)
	_, err := io.WriteString(w, b.String())
	return err
}

func writeFields(b *strings.Builder, prefix string, v reflect.Value, keys *redact.Redactor) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if !f.IsExported() {
			continue
		}
		name, field := prefix+f.Name, v.Field(i)
		if field.Kind() == reflect.Struct && field.NumField() > 0 && strings.HasPrefix(field.Type().PkgPath(), "github.com/skeindb/") {
			writeFields(b, name+".", field, keys)
			continue
		}
		fmt.Fprintf(b, "%s: %s\n", name, fieldText(name, field.Interface(), keys))
	}
}

// fieldText is the value of a field. A token of the cluster keeps others out of it.
func fieldText(name string, v any, keys *redact.Redactor) string {
	switch v := v.(type) {
	case []url.URL:
		var all []string
		for i := range v {
			all = append(all, v[i].Redacted())
		}
		return strings.Join(all, ",")
	case [][]byte:
		var all []string
		for _, k := range v {
			all = append(all, fmt.Sprintf("%q", keys.Key(k)))
		}
		return strings.Join(all, ",")
	}
	if name == "InitialClusterToken" {
		return redact.Hidden
	}
	return redact.Secrets(fmt.Sprint(v))
}
