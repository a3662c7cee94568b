package main

// dashboard is a page of rows of panels, three beside each other.
type dashboard struct {
	uid, title string
	rows       []row
}

type row struct {
	title  string
	panels []panel
}

// panel is a graph of one or several queries, or one number.
type panel struct {
	title string
	// unit is Grafana's: reqps, s, bytes, Bps, short, percentunit.
	unit    string
	targets []target
	// number shows the last value instead of a graph.
	number bool
	// help is what a reader should know of it.
	help string
}

// target is a query, in which $job and $instance stand for what the reader has chosen, and the name of its series.
type target struct{ expr, legend string }

func graph(title, unit, help string, targets ...target) panel {
	return panel{title: title, unit: unit, help: help, targets: targets}
}

func number(title, help, expr string) panel {
	return panel{title: title, unit: "short", help: help, number: true, targets: []target{{expr, ""}}}
}

// object is one of JSON.
type object = map[string]any

// source is the reader's choice of Prometheus.
var source = object{"type": "prometheus", "uid": "${datasource}"}

// Sizes in Grafana's grid, which is 24 wide.
const (
	panelWidth, panelHeight = 8, 7
	numberHeight            = 4
)

// grafana returns the dashboard as Grafana reads it.
func (d *dashboard) grafana() object {
	var panels []object
	y, id := 0, 0
	for _, r := range d.rows {
		id++
		panels = append(panels, object{"id": id, "type": "row", "title": r.title, "collapsed": false, "panels": []any{}, "gridPos": grid(0, y, 24, 1)})
		y++
		x, tallest := 0, 0
		for i := range r.panels {
			p := &r.panels[i]
			width, height := panelWidth, panelHeight
			if p.number {
				width, height = panelWidth/2, numberHeight
			}
			if x+width > 24 {
				x, y, tallest = 0, y+tallest, 0
			}
			id++
			panels = append(panels, p.grafana(id, grid(x, y, width, height)))
			x, tallest = x+width, max(tallest, height)
		}
		y += tallest
	}
	return object{
		"uid": d.uid, "title": d.title, "tags": []string{"skein"}, "schemaVersion": 39, "editable": true, "refresh": "30s",
		"time":       object{"from": "now-1h", "to": "now"},
		"templating": object{"list": variables()},
		"links":      []object{{"type": "dashboards", "title": "Skein", "tags": []string{"skein"}, "asDropdown": true, "includeVars": true, "keepTime": true}},
		"panels":     panels,
	}
}

func grid(x, y, w, h int) object { return object{"x": x, "y": y, "w": w, "h": h} }

func (p *panel) grafana(id int, at object) object {
	var targets []object
	for i, t := range p.targets {
		targets = append(targets, object{"refId": string(rune('A' + i)), "expr": t.expr, "legendFormat": t.legend, "datasource": source})
	}
	kind, options := "timeseries", object{"legend": object{"displayMode": "list", "placement": "bottom"}, "tooltip": object{"mode": "multi", "sort": "desc"}}
	if p.number {
		kind, options = "stat", object{"reduceOptions": object{"calcs": []string{"lastNotNull"}}, "colorMode": "none", "graphMode": "area"}
	}
	return object{
		"id": id, "type": kind, "title": p.title, "description": p.help, "datasource": source, "gridPos": at, "targets": targets, "options": options,
		"fieldConfig": object{"defaults": object{"unit": p.unit, "min": 0}, "overrides": []any{}},
	}
}

// variables are what the reader chooses.
func variables() []object {
	ask := func(name, label, query string, all bool) object {
		v := object{
			"name": name, "label": label, "type": "query", "datasource": source, "query": object{"query": query, "refId": "A"}, "definition": query,
			"refresh": 2, "sort": 1, "includeAll": all, "multi": all,
		}
		if all {
			v["allValue"], v["current"] = ".+", object{"text": "All", "value": "$__all"}
		}
		return v
	}
	return []object{
		{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
		ask("job", "job", "label_values(skein_version, job)", false),
		ask("instance", "node", `label_values(skein_version{job="$job"}, instance)`, true),
	}
}
