// Renders the chart of deploy/helm: text/template with sprig, and what of helm's own functions the chart may use. It is not
// helm: values.schema.json, hooks and dependencies are not looked at.
//
// renderer CHART RELEASE NAMESPACE [VALUES.yaml]...
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"github.com/ghodss/yaml"
)

type object = map[string]interface{}

func read(path string) (object, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	found := object{}
	return found, yaml.Unmarshal(text, &found)
}

// As helm: mappings are merged, null removes a key, everything else is replaced.
func merge(into, from object) {
	for key, value := range from {
		inner, isObject := value.(object)
		before, wasObject := into[key].(object)
		switch {
		case value == nil:
			delete(into, key)
		case isObject && wasObject:
			merge(before, inner)
		default:
			into[key] = value
		}
	}
}

func render(chart, release, namespace string, files []string) error {
	about, err := read(filepath.Join(chart, "Chart.yaml"))
	if err != nil {
		return err
	}
	values, err := read(filepath.Join(chart, "values.yaml"))
	if err != nil {
		return err
	}
	for _, file := range files {
		more, err := read(file)
		if err != nil {
			return err
		}
		merge(values, more)
	}
	// Names of Chart.yaml are those of a Go structure in templates.
	fields := object{}
	for key, value := range about {
		fields[strings.ToUpper(key[:1])+key[1:]] = value
	}
	data := object{
		"Values": values,
		"Chart":  fields,
		"Release": object{"Name": release, "Namespace": namespace, "Service": "Helm"},
	}
	all := template.New("chart").Option("missingkey=error")
	functions := sprig.TxtFuncMap()
	// helm has neither.
	delete(functions, "env")
	delete(functions, "expandenv")
	functions["toYaml"] = func(value interface{}) (string, error) {
		text, err := yaml.Marshal(value)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	functions["include"] = func(name string, data interface{}) (string, error) {
		var text strings.Builder
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	functions["tpl"] = func(source string, data interface{}) (string, error) {
		own, err := all.Clone()
		if err != nil {
			return "", err
		}
		if own, err = own.New("tpl").Parse(source); err != nil {
			return "", err
		}
		var text strings.Builder
		err = own.Execute(&text, data)
		return text.String(), err
	}
	functions["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, fmt.Errorf("%s", message)
		}
		return value, nil
	}
	all.Funcs(functions)
	names, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	if err != nil {
		return err
	}
	sort.Strings(names)
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if _, err := all.New(filepath.Base(name)).Parse(string(text)); err != nil {
			return err
		}
	}
	for _, name := range names {
		if filepath.Ext(name) != ".yaml" {
			continue
		}
		var text strings.Builder
		if err := all.ExecuteTemplate(&text, filepath.Base(name), data); err != nil {
			return err
		}
		fmt.Printf("---\n%s\n", text.String())
	}
	return nil
}

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "renderer CHART RELEASE NAMESPACE [VALUES.yaml]...")
		os.Exit(2)
	}
	if err := render(os.Args[1], os.Args[2], os.Args[3], os.Args[4:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
