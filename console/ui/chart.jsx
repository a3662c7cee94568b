// Lines over the last hour, one for each node.
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { Card, Dot, colourOf } from "./parts.jsx";
import { bytes, clockTime, count } from "./format.js";
import { table, version } from "./series.js";
import { dark } from "./theme.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// whole are the steps of an axis of things that are counted.
const whole = [...Array(12).keys()].flatMap((e) => [1, 2, 5].map((m) => m * 10 ** e));
const powers = [...Array(50).keys()].map((e) => 2 ** e);

// Chart draws the sum of some series for each node.
export function Chart({ title, nodes, series, format, note }) {
  const box = useRef();
  const plot = useRef();
  const [at, setAt] = useState(null);
  const data = table(nodes, series);
  const shown = `${nodes.join()} ${dark.value}`;

  useEffect(() => {
    const axis = { stroke: css("--dim"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: css("--line"), width: 1 } };
    plot.current = new uPlot(
      {
        width: box.current.clientWidth,
        height: 150,
        cursor: { sync: { key: "hour" }, y: false, points: { size: 6 }, drag: { x: false, y: false } },
        legend: { show: false },
        padding: [8, 18, 0, 0],
        scales: { x: { time: true, range: (_, min, max) => [Math.min(min ?? 0, (max ?? 0) - 600), max ?? 0] }, y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] } },
        axes: [
          { ...axis, size: 24, space: 70, grid: { show: false }, values: (_, ts) => ts.map((t) => clockTime(t * 1000).slice(0, 5)) },
          { ...axis, size: 62, space: 36, values: (_, vs) => vs.map((v) => (v === 0 ? "0" : format(v))), ...(format === count && { incrs: whole }), ...(format === bytes && { incrs: powers }) },
        ],
        series: [{}, ...nodes.map((n) => ({ stroke: colourOf(n), width: 1.75, points: { show: false }, spanGaps: false }))],
        hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)] },
      },
      data,
      box.current,
    );
    const drawn = box.current; // the observer may see its end
    const resize = new ResizeObserver(() => drawn.isConnected && plot.current?.setSize({ width: drawn.clientWidth, height: 150 }));
    resize.observe(drawn);
    return () => {
      resize.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [shown]);

  useEffect(() => {
    plot.current?.setData(data);
  }, [version.value, shown]);

  const i = at !== null && at < data[0].length ? at : data[0].length - 1;
  return (
    <Card
      title={title}
      side={
        <span class="legend">
          {at !== null && data[0][i] && <time>{clockTime(data[0][i] * 1000)}</time>}
          {nodes.map((n, k) => (
            <span>
              <Dot node={n} />
              {data[k + 1][i] == null ? "–" : format(data[k + 1][i])}
            </span>
          ))}
        </span>
      }
    >
      <div class="chart" ref={box} role="img" aria-label={`${title} during the last hour`} />
      {data[0].length < 2 && <p class="empty over">The first points come within twenty seconds.</p>}
      {note && <p class="note">{note}</p>}
    </Card>
  );
}

// Spark is a small line without axes.
export function Spark({ values, colour }) {
  if (values.length < 2) return <span class="spark" />;
  const top = Math.max(...values, 1e-9);
  const points = values.map((v, i) => `${((i / (values.length - 1)) * 96 + 2).toFixed(1)},${(22 - (v / top) * 20).toFixed(1)}`);
  return (
    <svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true">
      <polyline points={points.join(" ")} fill="none" stroke={colour} stroke-width="1.6" vector-effect="non-scaling-stroke" />
    </svg>
  );
}
