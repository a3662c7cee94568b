// The frame of the console: who is here, which page is shown, light or dark, and the keys of the keyboard.
import { h, render, Fragment } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { signal } from "@preact/signals";
import { ask, begin, every, logIn, logOut, session, usePoll, user } from "./api.js";
import { Problem } from "./parts.jsx";
import { dark, switchTheme } from "./theme.js";
import { Overview, learnNames } from "./overview.jsx";
import { Heat } from "./heat.jsx";
import { Ranges } from "./ranges.jsx";
import { Nodes } from "./nodes.jsx";
import { Operations } from "./operations.jsx";
import { Slow } from "./slow.jsx";
import { Watchers } from "./watchers.jsx";
import { Keys } from "./keys.jsx";

// pages are all there are; when says for whom.
const root = (s) => s.root;
const pages = [
  { path: "overview", name: "Overview", icon: "M3 12l7-8 7 8M5 10v7h10v-7", page: Overview, when: root },
  { path: "heat", name: "Heat map", icon: "M3 3h6v6H3zM11 3h6v6h-6zM3 11h6v6H3zM11 11h6v6h-6z", page: Heat, when: (s) => s.root && s.heat },
  { path: "ranges", name: "Ranges", icon: "M2 10h16M6 6v8M11 6v8M15 6v8", page: Ranges, when: root },
  { path: "nodes", name: "Nodes", icon: "M3 4h14v5H3zM3 11h14v5H3zM6 6.5h.01M6 13.5h.01", page: Nodes, when: root },
  { path: "operations", name: "Operations", icon: "M4 7h11l-3-3M16 13H5l3 3", page: Operations, when: root },
  { path: "slow", name: "Slow requests", icon: "M10 3a7 7 0 1 0 .01 0M10 6v4l3 2", page: Slow, when: (s) => s.root && s.slow },
  { path: "watchers", name: "Watchers, leases", icon: "M2 10s3-5 8-5 8 5 8 5-3 5-8 5-8-5-8-5zM10 8a2 2 0 1 0 .01 0", page: Watchers, when: root },
  { path: "keys", name: "Keys", icon: "M7 13a4 4 0 1 1 3-6.5L17 6.5v3h-2v2h-3l-2 1", page: Keys, when: () => true },
];

const hash = signal(location.hash);
addEventListener("hashchange", () => (hash.value = location.hash));

// route is the path and what stands behind its question mark.
function route(all) {
  const [path, query = ""] = hash.value.replace(/^#\//, "").split("?");
  return { page: all.find((p) => p.path === path) || all[0], query };
}

function App() {
  const [error, setError] = useState();
  const [help, setHelp] = useState(false);
  const s = session.value;
  useLayoutEffect(() => {
    let timer = 0;
    const open = () =>
      begin().catch((e) => {
        setError(e);
        timer = setTimeout(open, every); // the node may know soon
      });
    open();
    return () => clearTimeout(timer);
  }, []);
  // Whichever page comes first, the nodes have their names and colours. A page that needs more of them asks more often.
  usePoll(async (stop) => s?.root && learnNames(((await ask("survey", {}, stop)).survey.nodes || []).map((n) => n.node)), 30000, [s?.root]);
  const all = s ? pages.filter((p) => p.when(s)) : [];
  useEffect(() => {
    const keys = (e) => {
      if (e.target.closest?.("input, textarea, select, dialog") || e.ctrlKey || e.metaKey || e.altKey) return;
      const n = Number(e.key);
      if (n >= 1 && n <= all.length) location.hash = "#/" + all[n - 1].path;
      else if (e.key === "t") switchTheme();
      else if (e.key === "?") setHelp(true);
      else if (e.key === "/") {
        const search = document.querySelector("input[type=search]");
        if (search) {
          e.preventDefault();
          search.focus();
        }
      }
    };
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  });
  if (!s) {
    return (
      <main class="alone">
        <Problem error={error} />
      </main>
    );
  }
  if (s.login) return <Login />;
  const { page, query } = route(all);
  document.title = `${page.name} – Skein`;
  const Shown = page.page;
  return (
    <>
      <a class="skip" href="#main" onClick={(e) => (e.preventDefault(), document.getElementById("main").focus())}>
        Go to the page
      </a>
      <nav class="side" aria-label="pages">
        <a class="brand" href="#/overview">
          <img src="icon.svg" alt="" width="28" height="28" />
          <span>Skein</span>
        </a>
        {all.map((p, i) => (
          <a href={"#/" + p.path} class={p === page ? "on" : ""} aria-current={p === page ? "page" : undefined} title={`${p.name} (${i + 1})`}>
            <svg viewBox="0 0 20 20" aria-hidden="true">
              <path d={p.icon} />
            </svg>
            <span>{p.name}</span>
          </a>
        ))}
        <div class="foot">
          <span class="who" title={`This is the console of ${s.node}, build ${s.version}`}>
            {s.node} <small>{s.version}</small>
          </span>
          <span class="who">
            <small>{s.full ? "full: may change the cluster" : "read-only"}</small>
          </span>
          {s.auth && user.value && (
            <button class="plain" onClick={logOut}>
              Log out {user.value}
            </button>
          )}
          <span class="row">
            <button class="plain" onClick={switchTheme} aria-label={dark.value ? "Light colours" : "Dark colours"} title="Light or dark (t)">
              {dark.value ? "☀" : "☾"}
            </button>
            <button class="plain" onClick={() => setHelp(true)} aria-label="Keys of the keyboard" title="Keys (?)">
              ?
            </button>
          </span>
        </div>
      </nav>
      <main id="main" tabIndex={-1}>
        <Shown key={page.path} query={query} />
      </main>
      {help && <Help onClose={() => setHelp(false)} count={all.length} />}
    </>
  );
}

function Login() {
  const [state, set] = useState({});
  const submit = async (e) => {
    e.preventDefault();
    const { name, password } = Object.fromEntries(new FormData(e.target));
    set({ busy: true });
    try {
      await logIn(name, password);
    } catch (error) {
      set({ error });
    }
  };
  return (
    <main class="alone">
      <form class="card login" onSubmit={submit}>
        <img src="icon.svg" alt="" width="44" height="44" />
        <h1>Skein</h1>
        <p class="note">This cluster checks users. root sees everything; others see keys, by their permissions.</p>
        <label>
          User
          <input name="name" autocomplete="username" autofocus required />
        </label>
        <label>
          Password
          <input name="password" type="password" autocomplete="current-password" />
        </label>
        <Problem error={state.error} />
        <button class="solid" disabled={state.busy}>
          Log in
        </button>
        <p class="note">The token stays in the memory of this page: a reload logs out.</p>
      </form>
    </main>
  );
}

function Help({ onClose, count }) {
  const ref = useRef();
  useEffect(() => ref.current.showModal(), []);
  return (
    <dialog ref={ref} onClose={onClose}>
      <h2>Keys of the keyboard</h2>
      <dl class="facts">
        <dt>1 … {count}</dt>
        <dd>go to a page</dd>
        <dt>/</dt>
        <dd>search</dd>
        <dt>↑ ↓, Enter</dt>
        <dd>go through a table, open a row</dd>
        <dt>Esc</dt>
        <dd>close what is open</dd>
        <dt>t</dt>
        <dd>light or dark</dd>
      </dl>
      <footer>
        <button class="solid" onClick={() => ref.current.close()}>
          Close
        </button>
      </footer>
    </dialog>
  );
}

render(<App />, document.getElementById("app"));
