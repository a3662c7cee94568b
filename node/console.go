package node

import (
	"net/http"
	"slices"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/console"
	"github.com/skeindb/skein/etcdapi"
)

// showConsole has the face serve the console, unless it is off.
func showConsole(cfg *config.Config, face *etcdapi.Options) {
	if cfg.Console == config.ConsoleOff {
		return
	}
	face.ConsoleURLs = cfg.ListenConsoleURLs
	for _, u := range slices.Concat(cfg.ListenClientURLs, cfg.AdvertiseClientURLs, cfg.ListenConsoleURLs) {
		face.ConsoleHosts = append(face.ConsoleHosts, u.Hostname())
	}
	face.Console = func(s *etcdapi.Services) http.Handler {
		return console.New(console.Options{
			Services: s, Clock: clock.System(), Node: cfg.Name, Version: etcdapi.SkeinVersion, Full: cfg.Console == config.ConsoleFull,
			Diagnose: func(survey *adminpb.SurveyResponse) (all []console.Finding) {
				for _, f := range adminapi.Diagnose(survey, nil) {
					all = append(all, console.Finding{Severity: string(f.Severity), Check: f.Check, What: f.What, Next: f.Next})
				}
				return all
			},
		})
	}
}
