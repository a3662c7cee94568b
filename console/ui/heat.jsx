import { h, Fragment } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { admin, usePoll } from "./api.js";
import { beyond, bytes, clockTime, count, dateTime, key as keyText, num, pack, parseKey, rate, span } from "./format.js";
import { Choice, Key, Live, Page } from "./parts.jsx";
import { dark } from "./theme.js";

const spans = [
  [3600, "1 h"],
  [6 * 3600, "6 h"],
  [86400, "1 d"],
  [4 * 86400, "4 d"],
  [28 * 86400, "28 d"],
];
const kinds = [
  ["writes", "writes"],
  ["reads", "reads"],
  ["bytes", "written"],
];

// Heat shows where in the keyspace the load was, over time: a row for each span of keys, a column for each span of time.
export function Heat() {
  const [back, setBack] = useState(3600);
  const [kind, setKind] = useState("writes");
  const [prefix, setPrefix] = useState("");
  const poll = usePoll(
    (stop) => {
      const p = parseKey(prefix);
      const keys = p.length ? { start: pack(p), end: pack(beyond(p)) } : {};
      return admin("Heat", { last_seconds: back, max_rows: 256, max_columns: 400, ...keys }, stop);
    },
    back <= 6 * 3600 ? 10000 : 60000,
    [back, prefix],
  );
  return (
    <Page
      title="Heat map"
      hint="load by key and time"
      tools={
        <>
          <input type="search" placeholder="prefix  /" aria-label="prefix" spellcheck={false} value={prefix} onInput={(e) => setPrefix(e.target.value)} />
          <Choice label="measure" options={kinds} value={kind} onChange={setKind} />
          <Choice label="time" options={spans} value={back} onChange={setBack} />
        </>
      }
    >
      <Live poll={poll}>
        {(heat) => (
          <>
            {(heat.missing || []).map((m) => (
              <div class="problem soft">
                {m.node}: {m.reason}
              </div>
            ))}
            <Map heat={heat} kind={kind} back={back} />
          </>
        )}
      </Live>
    </Page>
  );
}

// The colours from cold to hot, on dark and on light ground; evenly spaced for the eye.
const ramps = {
  dark: ["#141a26", "#1d2f5c", "#2b4f9e", "#5a54b8", "#9a4fb0", "#d2557f", "#f0804a", "#fbb941", "#fff3a3"],
  light: ["#f1f4f9", "#d3e0f5", "#a9c6ee", "#83a3e0", "#8277cb", "#9c4fae", "#c03a7e", "#d8392f", "#7d0f14"],
};

function colourTable(name) {
  const stops = ramps[name].map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
  const table = new Uint8ClampedArray(256 * 4);
  for (let i = 0; i < 256; i++) {
    const x = (i / 255) * (stops.length - 1), k = Math.min(Math.floor(x), stops.length - 2), f = x - k;
    for (let c = 0; c < 3; c++) table[i * 4 + c] = stops[k][c] + (stops[k + 1][c] - stops[k][c]) * f;
    table[i * 4 + 3] = 255;
  }
  return table;
}

const left = 190, below = 26, rowGap = 18;

function Map({ heat, kind, back }) {
  const canvas = useRef();
  const box = useRef();
  const [at, setAt] = useState();
  const [width, setWidth] = useState(0);
  const rows = (heat.starts || []).length, columns = (heat.columns || []).length;
  const height = Math.max(320, Math.min(720, innerHeight - 250));
  const name = dark.value ? "dark" : "light";
  // A move of the pointer changes neither.
  const { rates, top } = useMemo(() => measure(heat, kind), [heat, kind]);
  const image = useMemo(() => paint(heat, rates, top, name), [rates, name]);

  useEffect(() => {
    const drawn = box.current;
    const o = new ResizeObserver(([now]) => drawn.isConnected && setWidth(now.contentRect.width));
    o.observe(drawn);
    return () => o.disconnect();
  }, []);

  // Before the page is painted: the map agrees with what is said below it.
  useLayoutEffect(() => {
    if (!width || !canvas.current) return; // where there is nothing to draw, there is no canvas
    draw(canvas.current, { width, height, rows, columns, image, heat, at, back });
  }, [width, height, image, at]);

  if (!rows || !columns || top === 0) {
    return (
      <div class="card" ref={box}>
        <p class="empty">Nothing was read or written here during this time, or nobody has counted yet: the first column comes after a minute.</p>
      </div>
    );
  }
  const place = (e) => {
    const b = canvas.current.getBoundingClientRect();
    const c = Math.floor(((e.clientX - b.left - left) / (b.width - left)) * columns);
    const r = rows - 1 - Math.floor(((e.clientY - b.top) / (b.height - below)) * rows);
    setAt(c >= 0 && c < columns && r >= 0 && r < rows ? { r, c } : undefined);
  };
  const step = (e) => {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] }[e.key];
    if (!by) return;
    e.preventDefault();
    const now = at || { r: Math.floor(rows / 2), c: columns - 1 };
    setAt({ r: Math.max(0, Math.min(rows - 1, now.r + by[0])), c: Math.max(0, Math.min(columns - 1, now.c + by[1])) });
  };
  const cell = at && at.r < rows && at.c < columns ? at : null;
  return (
    <div class="card heat" ref={box}>
      <canvas
        ref={canvas}
        tabIndex={0}
        role="img"
        aria-label={`${kind} by key and time; the arrow keys go through it`}
        onMouseMove={place}
        onMouseLeave={() => setAt()}
        onKeyDown={step}
        style={{ height: `${height}px` }}
      />
      <div class="readout" aria-live="polite">
        {cell ? (
          <>
            <span>
              <Key b64={heat.starts[cell.r]} /> <span class="dim">to</span> <Key b64={cell.r + 1 < rows ? heat.starts[cell.r + 1] : heat.end} end />
            </span>
            <time>
              {dateTime(num(heat.columns[cell.c].start_unix_seconds) * 1000)}, {span(num(heat.columns[cell.c].seconds))}
            </time>
            {kinds.map(([k, n]) => {
              const v = num((heat[k] || [])[cell.r * columns + cell.c]);
              return (
                <b class={k === kind ? "" : "dim"}>
                  {k === "bytes" ? bytes(v) : count(v)} {n}
                </b>
              );
            })}
          </>
        ) : (
          <span class="dim">Point at a cell, or go through them with the arrow keys.</span>
        )}
        <span class="scale">
          0
          <i class={"ramp " + name} />
          {kind === "bytes" ? bytes(top) : rate(top)}/s
        </span>
      </div>
    </div>
  );
}

// measure returns the requests or bytes a second of all cells, row by row, and the most of them. The last column may not be over
// yet, by the clock of the node that has answered.
function measure(heat, kind) {
  const columns = heat.columns || [], values = heat[kind] || [];
  const lasted = columns.map((c) => Math.max(1, Math.min(num(c.seconds), num(heat.unix_ms) / 1000 - num(c.start_unix_seconds))));
  const rates = Float64Array.from(values, (v, i) => num(v) / lasted[i % columns.length]);
  return { rates, top: rates.reduce((most, v) => Math.max(most, v), 0) };
}

// paint makes a picture with a pixel for each cell, the first key below. It is null where nothing was.
function paint(heat, rates, top, name) {
  const rows = (heat.starts || []).length, columns = (heat.columns || []).length;
  if (top === 0) return null;
  const colours = colourTable(name);
  const image = new ImageData(columns, rows);
  const scale = Math.log1p(top * 60);
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const v = rates[r * columns + c];
      const i = v > 0 ? Math.max(24, Math.round((Math.log1p(v * 60) / scale) * 255)) : 0;
      image.data.set(colours.subarray(i * 4, i * 4 + 4), ((rows - 1 - r) * columns + c) * 4);
    }
  }
  const small = new OffscreenCanvas(columns, rows);
  small.getContext("2d").putImageData(image, 0, 0);
  return small;
}

// draw shows the picture with its axes: keys grow upwards, time to the right.
function draw(canvas, { width, height, rows, columns, image, heat, at, back }) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  const css = getComputedStyle(document.documentElement);
  g.imageSmoothingEnabled = false;
  const w = width - left, hgt = height - below;
  g.drawImage(image, left, 0, w, hgt);

  g.font = "11px ui-monospace, monospace";
  g.fillStyle = css.getPropertyValue("--dim");
  g.textBaseline = "middle";
  g.textAlign = "right";
  let lastY = Infinity;
  for (let r = 0; r < rows; r++) {
    const y = hgt - ((r + 0.5) / rows) * hgt;
    if (lastY - y < rowGap && r > 0) continue;
    lastY = y;
    let t = keyText(heat.starts[r]) || "(first)";
    if (t.length > 26) t = t.slice(0, 12) + "…" + t.slice(-13);
    g.fillText(t, left - 8, Math.max(7, y));
  }
  g.font = "11px system-ui, sans-serif";
  g.textAlign = "center";
  g.textBaseline = "alphabetic";
  const every = Math.max(1, Math.ceil(columns / Math.max(2, Math.floor(w / 110))));
  for (let c = Math.floor(every / 2); c < columns; c += every) {
    const ms = num(heat.columns[c].start_unix_seconds) * 1000;
    const t = back > 86400 ? dateTime(ms).slice(5) : clockTime(ms).slice(0, 5);
    g.fillText(t, Math.min(left + ((c + 0.5) / columns) * w, width - g.measureText(t).width / 2), height - 8);
  }
  if (at && at.r < rows && at.c < columns) {
    const x = left + (at.c / columns) * w, y = hgt - ((at.r + 1) / rows) * hgt;
    g.strokeStyle = css.getPropertyValue("--text");
    g.lineWidth = 1.5;
    g.strokeRect(x - 0.75, y - 0.75, w / columns + 1.5, hgt / rows + 1.5);
    g.globalAlpha = 0.25;
    g.strokeRect(left, y, w, hgt / rows);
    g.strokeRect(x, 0, w / columns, hgt);
    g.globalAlpha = 1;
  }
}
