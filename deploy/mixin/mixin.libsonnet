// Written by go generate ./deploy/mixin.
{
  _config+:: {
    // Which series are Skein's.
    skeinSelector: 'job=~".*skein.*"',
  },
  local rules(text) = std.parseYaml(std.strReplace(text, 'job=~".*skein.*"', $._config.skeinSelector)),
  prometheusAlerts+:: { groups+: rules(importstr 'alerts.yaml').groups },
  prometheusRules+:: { groups+: rules(importstr 'rules.yaml').groups },
  grafanaDashboards+:: {
    'skein-overview.json': import 'dashboards/skein-overview.json',
    'skein-ranges.json': import 'dashboards/skein-ranges.json',
    'skein-storage.json': import 'dashboards/skein-storage.json',
    'skein-network.json': import 'dashboards/skein-network.json',
    'skein-clients.json': import 'dashboards/skein-clients.json',
  },
}
