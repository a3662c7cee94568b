// What all pages are made of.
import { h, Fragment } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { signal } from "@preact/signals";
import { key } from "./format.js";

// colours are those of nodes, by their place in the list of nodes.
export const colours = ["#2f6fed", "#e0742a", "#1a9c74", "#b14bd0", "#d63a5a", "#7a8b12", "#0f93b8", "#8a6a4a"];

export const names = signal([]);
export const colourOf = (node) => colours[Math.max(0, names.value.indexOf(node)) % colours.length];

export function Page({ title, hint, children, tools }) {
  return (
    <section class="page" aria-label={title}>
      <header class="title">
        <h1>{title}</h1>
        {hint && <span class="hint">{hint}</span>}
        <span class="tools">{tools}</span>
      </header>
      {children}
    </section>
  );
}

export const Card = ({ title, children, side, tight, wide }) => (
  <div class={"card" + (tight ? " tight" : "") + (wide ? " wide" : "")}>
    {(title || side) && (
      <div class="cardhead">
        <h2>{title}</h2>
        <span>{side}</span>
      </div>
    )}
    {children}
  </div>
);

export const Badge = ({ kind = "", children }) => <span class={"badge " + kind}>{children}</span>;

export const Dot = ({ node }) => <i class="dot" style={{ background: colourOf(node) }} />;

export const NodeName = ({ node }) =>
  node ? (
    <span class="node">
      <Dot node={node} />
      {node}
    </span>
  ) : (
    <span class="dim">none</span>
  );

// stateKind is the colour of a node's or range's state.
export const stateKind = (s) =>
  ({ serving: "good", awake: "good", asleep: "quiet", dead: "bad", "no quorum": "bad", unreachable: "bad", draining: "warn", decommissioned: "warn", merging: "warn", unstarted: "quiet" })[s] || "quiet";

// Key shows a key; end is beyond the last key where it is empty.
export function Key({ b64, end }) {
  const t = key(b64);
  if (t === "") return <span class="dim">{end ? "the end" : "the beginning"}</span>;
  return (
    <code class="key" title={t}>
      {t}
    </code>
  );
}

export function Problem({ error }) {
  if (!error) return null;
  return (
    <div class="problem" role="alert">
      <b>{error.message}</b>
      {error.next && <span>{error.next}</span>}
    </div>
  );
}

// Live shows an error beside what was known before it, and nothing but a shimmer before anything is.
export function Live({ poll, children }) {
  return (
    <>
      <Problem error={poll.error} />
      {poll.data ? children(poll.data) : !poll.error && <div class="shimmer" aria-label="loading" />}
    </>
  );
}

export const Stale = ({ stale }) =>
  stale ? <div class="problem soft">No quorum answers: this is what the node knew last.</div> : null;

// Table has rows of cells, of which the first says what the row is. A row that can be opened is a button for the keyboard.
export function Table({ heads, rows, onOpen, open, empty = "There are none.", sort, onSort }) {
  if (rows.length === 0) return <p class="empty">{empty}</p>;
  return (
    <div class="scroll">
      <table>
        <thead>
          <tr>
            {heads.map((c) => {
              const { name, right, by } = typeof c === "string" ? { name: c } : c;
              return (
                <th class={right ? "right" : ""} aria-sort={by && sort === by ? "descending" : undefined}>
                  {by ? (
                    <button class={"sort" + (sort === by ? " on" : "")} onClick={() => onSort(by)}>
                      {name}
                    </button>
                  ) : (
                    name
                  )}
                </th>
              );
            })}
          </tr>
        </thead>
        <tbody>
          {rows.map((r) => (
            <tr
              key={r.id}
              class={(onOpen ? "opens" : "") + (open !== undefined && open === r.id ? " open" : "")}
              tabIndex={onOpen ? 0 : undefined}
              onClick={onOpen && (() => onOpen(r.id))}
              onKeyDown={
                onOpen &&
                ((e) => {
                  if (e.key === "Enter") onOpen(r.id);
                  const to = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[e.key];
                  if (to && e.target[to]) {
                    e.preventDefault();
                    e.target[to].focus();
                  }
                })
              }
            >
              {r.cells.map((c, i) => {
                const head = heads[i];
                return <td class={head.right ? "right" : ""}>{c}</td>;
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

// Pager goes through what does not fit on a page.
export function Pager({ skip, size, total, onSkip }) {
  if (total <= size) return null;
  return (
    <nav class="pager" aria-label="pages">
      <button disabled={skip === 0} onClick={() => onSkip(Math.max(0, skip - size))}>
        Previous
      </button>
      <span>
        {skip + 1}–{Math.min(skip + size, total)} of {total}
      </span>
      <button disabled={skip + size >= total} onClick={() => onSkip(skip + size)}>
        Next
      </button>
    </nav>
  );
}

export function Bar({ part, label }) {
  const p = Math.max(0, Math.min(1, part || 0));
  return (
    <span class="bar" title={label} role="img" aria-label={label}>
      <i class={p >= 0.95 ? "bad" : p >= 0.85 ? "warn" : ""} style={{ width: `${(p * 100).toFixed(1)}%` }} />
    </span>
  );
}

// Drawer is the side that shows one thing. Escape closes it.
export function Drawer({ title, onClose, children }) {
  const ref = useRef();
  useEffect(() => {
    const back = document.activeElement, drawer = ref.current;
    drawer.focus();
    const keys = (e) => e.key === "Escape" && !document.querySelector("dialog[open]") && onClose();
    addEventListener("keydown", keys);
    return () => {
      removeEventListener("keydown", keys);
      const now = document.activeElement;
      if (now === document.body || drawer.contains(now)) back?.focus?.(); // unless it has gone on to something else
    };
  }, []);
  return (
    <aside class="drawer" aria-label={title} tabIndex={-1} ref={ref}>
      <header>
        <h2>{title}</h2>
        <button class="plain" aria-label="Close" onClick={onClose}>
          ✕
        </button>
      </header>
      <div class="inside">{children}</div>
    </aside>
  );
}

export function Facts({ rows }) {
  return (
    <dl class="facts">
      {rows
        .filter(Boolean)
        .map(([k, v]) => (
          <Fragment key={k}>
            <dt>{k}</dt>
            <dd>{v}</dd>
          </Fragment>
        ))}
    </dl>
  );
}

// Action is a button that does something after a question, and says what came of it. What is asked and done is as it was
// when the question was opened: the page goes on beneath it, and an edit must not take a later value for its own.
export function Action({ label, danger, disabled, done, ...now }) {
  const [open, setOpen] = useState(false);
  const held = useRef(now);
  const { ask, question, fields = [], run } = held.current;
  const [state, setState] = useState({});
  const dialog = useRef();
  useEffect(() => {
    if (open && !dialog.current.open) dialog.current.showModal();
  }, [open]);
  const close = () => {
    setOpen(false);
    setState({});
  };
  const submit = async (e) => {
    e.preventDefault();
    const values = Object.fromEntries(new FormData(e.target));
    setState({ busy: true });
    try {
      await run(values);
      close();
      done?.();
    } catch (error) {
      setState({ error });
    }
  };
  return (
    <>
      <button class={danger ? "danger" : ""} disabled={disabled} onClick={() => ((held.current = now), setOpen(true))}>
        {label}
      </button>
      {open && (
        <dialog ref={dialog} onClose={close}>
          <form onSubmit={submit}>
            <h2>{ask}</h2>
            {question && <p>{question}</p>}
            {fields.map((f) => (
              <label>
                {f.label}
                {f.options ? (
                  <select name={f.name}>
                    {f.options.map((o) => (
                      <option value={o}>{o}</option>
                    ))}
                  </select>
                ) : f.lines ? (
                  <textarea name={f.name} rows={8} spellcheck={false} defaultValue={f.value || ""} />
                ) : (
                  <input name={f.name} defaultValue={f.value || ""} autocomplete="off" spellcheck={false} />
                )}
              </label>
            ))}
            <Problem error={state.error} />
            <footer>
              <button type="button" onClick={close}>
                Cancel
              </button>
              <button class={danger ? "danger solid" : "solid"} disabled={state.busy}>
                {label.replace(/…$/, "")}
              </button>
            </footer>
          </form>
        </dialog>
      )}
    </>
  );
}

export function Choice({ label, options, value, onChange }) {
  return (
    <div class="choice" role="radiogroup" aria-label={label}>
      {options.map(([v, name]) => (
        <button role="radio" aria-checked={v === value} class={v === value ? "on" : ""} onClick={() => onChange(v)}>
          {name}
        </button>
      ))}
    </div>
  );
}
