import { h, Fragment } from "preact";
import { useEffect } from "preact/hooks";
import { ask, every, usePoll } from "./api.js";
import { ago, bytes, count, millis, num, rate } from "./format.js";
import { Badge, Bar, Card, Live, NodeName, Page, Stale, names, stateKind } from "./parts.jsx";
import { Chart } from "./chart.jsx";
import { last, useSeries, version } from "./series.js";

const look = (stop) => ask("survey", {}, stop);

// Overview says at a glance whether all is well, and shows the last hour.
export function Overview() {
  const poll = usePoll(look, every);
  useSeries();
  return (
    <Page title="Overview" hint={poll.data && `as ${poll.data.survey.asked} sees it`}>
      <Live poll={poll}>{({ survey, findings }) => <Glance survey={survey} findings={findings} />}</Live>
    </Page>
  );
}

// ids are the names of nodes by their ids.
export const ids = new Map();

// learnNames has all pages draw a node in the same colour.
export function learnNames(nodes) {
  const all = nodes.map((n) => n.name).sort();
  if (all.join() !== names.value.join()) names.value = all;
  for (const n of nodes) ids.set(n.id, n.name);
}

function Glance({ survey, findings }) {
  const nodes = (survey.nodes || []).map((n) => n.node);
  learnNames(nodes);
  version.value; // drawn anew with each point
  useEffect(() => performance.mark("shown"), []); // what a test measures
  const started = nodes.filter((n) => n.state !== "unstarted").map((n) => n.name);
  const alive = nodes.filter((n) => n.alive).length;
  const stuck = (survey.outages || []).reduce((sum, o) => sum + num(o.ranges), 0);
  return (
    <>
      <Stale stale={survey.stale} />
      <Findings findings={findings} />
      <div class="tiles">
        <Tile name="Nodes alive" value={`${alive} / ${nodes.length}`} bad={alive < nodes.length} href="#/nodes" />
        <Tile name="Ranges" value={count(survey.ranges)} href="#/ranges" />
        <Tile name="No quorum" value={count(stuck)} bad={stuck > 0} href="#/ranges?trouble" />
        <Tile name="Writes a second" value={rate(last(started, "puts", "txns", "deletes"))} />
        <Tile name="Reads a second" value={rate(last(started, "reads"))} />
        <Tile name="Keys" value={count(last(started, "keys"))} href="#/keys" />
        <Tile name="Watchers" value={count(last(started, "watchers"))} href="#/watchers" />
        <Tile name="Operations" value={count((survey.operations || []).length)} href="#/operations" />
      </div>
      <div class="cards">
        {(survey.nodes || []).map((n) => (
          <NodeCard n={n} now={num(survey.unix_ms)} />
        ))}
      </div>
      <div class="charts">
        <Chart title="Writes a second" nodes={started} series={["puts", "txns", "deletes"]} format={rate} />
        <Chart title="Reads a second" nodes={started} series={["reads"]} format={rate} />
        <Chart title="Requests, 99th percentile" nodes={started} series={["request_p99_ms"]} format={millis} />
        <Chart title="Log fsync, 99th percentile" nodes={started} series={["fsync_p99_ms"]} format={millis} />
        <Chart title="Processor" nodes={started} series={["cpu_percent"]} format={(v) => num(v).toFixed(0) + " %"} />
        <Chart title="Memory" nodes={started} series={["memory_bytes"]} format={bytes} />
        <Chart title="Written to the log a second" nodes={started} series={["log_bytes"]} format={bytes} />
        <Chart title="Sent to clients a second" nodes={started} series={["client_out_bytes"]} format={bytes} />
      </div>
    </>
  );
}

const Tile = ({ name, value, bad, href }) => {
  const inner = (
    <>
      <span class={"figure" + (bad ? " bad" : "")}>{value}</span>
      <span class="label">{name}</span>
    </>
  );
  return href ? (
    <a class="tile" href={href}>
      {inner}
    </a>
  ) : (
    <div class="tile">{inner}</div>
  );
};

function Findings({ findings }) {
  const wrong = findings.filter((f) => f.severity !== "note");
  const notes = findings.filter((f) => f.severity === "note");
  return (
    <div class="findings" aria-live="polite">
      {wrong.length === 0 && (
        <div class="finding good">
          <i>✓</i>
          <div>
            <b>The cluster is healthy.</b>
          </div>
        </div>
      )}
      {wrong.map((f) => (
        <div class={"finding " + f.severity}>
          <i>{f.severity === "critical" ? "!" : "▲"}</i>
          <div>
            <b>{f.what}</b>
            <span>{f.next}</span>
          </div>
        </div>
      ))}
      {notes.length > 0 && (
        <details>
          <summary>
            {notes.length} {notes.length === 1 ? "note" : "notes"}
          </summary>
          {notes.map((f) => (
            <div class="finding note">
              <i>i</i>
              <div>
                <b>{f.what}</b>
                <span>{f.next}</span>
              </div>
            </div>
          ))}
        </details>
      )}
    </div>
  );
}

function NodeCard({ n, now }) {
  const node = n.node;
  const part = num(n.disk_capacity) ? num(n.disk_used) / num(n.disk_capacity) : 0;
  return (
    <Card
      tight
      title={<NodeName node={node.name} />}
      side={
        <>
          {node.placement_leader && <Badge kind="info">sequencer</Badge>}
          <Badge kind={stateKind(node.state)}>{node.state}</Badge>
        </>
      }
    >
      {n.error && node.alive && <p class="note bad">{n.error}</p>}
      <dl class="mini">
        <dt>leads</dt>
        <dd>
          {count(node.leaders)} of {count(node.ranges)} ranges
        </dd>
        <dt>data</dt>
        <dd>{bytes(node.bytes)}</dd>
        <dt>disk</dt>
        <dd>{num(n.disk_capacity) ? <Bar part={part} label={`${bytes(n.disk_used)} of ${bytes(n.disk_capacity)} used`} /> : "–"}</dd>
        <dt>{node.alive ? "fsync p99" : "heard"}</dt>
        <dd>{node.alive ? millis(num(n.fsync_p99_us) / 1000) : ago(node.since_unix_ms, now)}</dd>
      </dl>
    </Card>
  );
}
