// The last hour of all nodes. Points are asked for once, and then those that have come since.
import { signal } from "@preact/signals";
import { admin, usePoll } from "./api.js";

const step = 10; // seconds between two points
const most = 360;

// hour is a map of nodes to maps of times (seconds, in steps) to maps of series to values. version counts its changes.
const hour = new Map();
export const version = signal(0);

// newest is the time of the newest point of all nodes: ages are measured against it, as the browser's clock may be wrong.
function newest() {
  let t = 0;
  for (const points of hour.values()) t = Math.max(t, ...points.keys());
  return t;
}

// take puts an answer into the hour, and forgets what is older.
function take(answer) {
  for (const n of answer.nodes || []) {
    let points = hour.get(n.node);
    if (!points) hour.set(n.node, (points = new Map()));
    (n.unix_ms || []).forEach((ms, i) => {
      const p = {};
      for (const s of n.series || []) p[s.name] = Number(s.values[i]);
      points.set(Math.round(Number(ms) / 1000 / step) * step, p);
    });
  }
  const oldest = newest() - most * step;
  for (const points of hour.values()) for (const t of points.keys()) if (t < oldest) points.delete(t);
  version.value++;
}

// since is the time after which every node that has answered may have more.
function since() {
  let least = Infinity;
  for (const points of hour.values()) {
    const last = Math.max(0, ...points.keys());
    if (last) least = Math.min(least, last);
  }
  return least === Infinity ? 0 : (least - step) * 1000;
}

// useSeries keeps the hour fresh while a page needs it.
export function useSeries() {
  return usePoll(async (stop) => {
    take(await admin("Series", { after_unix_ms: String(since()) }, stop));
    return version.value;
  }, step * 1000);
}

// table is what uPlot draws: the times, and for each node the values of the sum of some series.
export function table(nodes, series) {
  const times = new Set();
  for (const n of nodes) for (const t of hour.get(n)?.keys() || []) times.add(t);
  const xs = [...times].sort((a, b) => a - b);
  return [
    xs,
    ...nodes.map((n) => {
      const points = hour.get(n);
      return xs.map((t) => {
        const p = points?.get(t);
        return p ? series.reduce((sum, s) => sum + (p[s] || 0), 0) : null;
      });
    }),
  ];
}

// last is the sum of the newest values of all nodes, each at most a minute older than the newest of all.
export function last(nodes, ...series) {
  const now = newest();
  let sum = 0;
  for (const n of nodes) {
    const points = hour.get(n);
    const t = points && Math.max(0, ...points.keys());
    if (t && now - t < 60) for (const s of series) sum += points.get(t)[s] || 0;
  }
  return sum;
}

// tail are the last values of one node, for a small line.
export function tail(node, series, n = 60) {
  const points = hour.get(node);
  if (!points) return [];
  return [...points.keys()]
    .sort((a, b) => a - b)
    .slice(-n)
    .map((t) => series.reduce((sum, s) => sum + (points.get(t)[s] || 0), 0));
}
