import { h, Fragment } from "preact";
import { useState } from "preact/hooks";
import { admin, ask, every, session, usePoll } from "./api.js";
import { ago, bytes, count, millis, num, rate } from "./format.js";
import { Action, Badge, Bar, Drawer, Facts, Key, Live, NodeName, Page, Problem, Stale, Table, colourOf, stateKind } from "./parts.jsx";
import { Spark } from "./chart.jsx";
import { learnNames } from "./overview.jsx";
import { tail, useSeries, version } from "./series.js";

// Nodes lists the nodes with their load, and opens one of them.
export function Nodes() {
  const poll = usePoll((stop) => ask("survey", {}, stop), every);
  const [open, setOpen] = useState();
  useSeries();
  version.value; // drawn anew with each point
  return (
    <Page title="Nodes" hint={poll.data && `as ${poll.data.survey.asked} sees them`}>
      <Live poll={poll}>
        {({ survey }) => {
          learnNames((survey.nodes || []).map((n) => n.node));
          const builds = Object.fromEntries((survey.versions?.nodes || []).map((n) => [n.name, n.build]));
          return (
            <>
              <Stale stale={survey.stale} />
              <Table
                heads={[
                  { name: "Node" },
                  { name: "State" },
                  { name: "Leads", right: true },
                  { name: "Ranges", right: true },
                  { name: "Data", right: true },
                  { name: "Disk" },
                  { name: "Fsync p99", right: true },
                  { name: "Clock", right: true },
                  { name: "Writes, ten minutes" },
                  { name: "Processor" },
                  { name: "Build" },
                ]}
                onOpen={setOpen}
                open={open}
                rows={(survey.nodes || []).map((n) => {
                  const node = n.node;
                  return {
                    id: node.name,
                    cells: [
                      <>
                        <NodeName node={node.name} /> {node.placement_leader ? <Badge kind="info">sequencer</Badge> : node.placement && <Badge kind="quiet">placement</Badge>}
                      </>,
                      <>
                        <Badge kind={stateKind(node.state)}>{node.state}</Badge>
                        {!node.alive && num(node.since_unix_ms) > 0 && <small class="dim"> {ago(node.since_unix_ms, num(survey.unix_ms))}</small>}
                        {n.isolated && <Badge kind="bad">isolated</Badge>}
                        {num(node.quarantined) > 0 && <Badge kind="bad">{node.quarantined} in quarantine</Badge>}
                      </>,
                      count(node.leaders),
                      count(node.ranges),
                      bytes(node.bytes),
                      num(n.disk_capacity) ? <Bar part={num(n.disk_used) / num(n.disk_capacity)} label={`${bytes(n.disk_used)} of ${bytes(n.disk_capacity)} used`} /> : "–",
                      millis(num(n.fsync_p99_us) / 1000),
                      num(n.clock_ahead_ms) ? `${num(n.clock_ahead_ms) > 0 ? "+" : ""}${num(n.clock_ahead_ms)} ms` : "0",
                      <Spark values={tail(node.name, ["puts", "txns", "deletes"])} colour={colourOf(node.name)} />,
                      <Spark values={tail(node.name, ["cpu_percent"])} colour={colourOf(node.name)} />,
                      builds[node.name] || "?",
                    ],
                  };
                })}
              />
            </>
          );
        }}
      </Live>
      {open && <One key={open} name={open} onClose={() => setOpen()} changed={poll.again} />}
    </Page>
  );
}

// One shows a node, what it holds, and why it could not be taken out of service.
function One({ name, onClose, changed }) {
  const poll = usePoll((stop) => admin("NodeShow", { node: name }, stop), every);
  const done = () => {
    changed();
    poll.again();
  };
  return (
    <Drawer title={`Node ${name}`} onClose={onClose}>
      <Live poll={poll}>
        {(s) => {
          const n = s.node;
          return (
            <>
              <Stale stale={s.stale} />
              <Facts
                rows={[
                  ["State", <Badge kind={stateKind(n.state)}>{n.state}</Badge>],
                  ["Id", <code>{n.id}</code>],
                  ["Clients", (n.client_urls || []).join(", ")],
                  ["Peers", (n.peer_urls || []).join(", ")],
                  n.attributes && ["Attributes", n.attributes.map((a) => `${a.key}=${a.value}`).join(", ")],
                  ["Data", bytes(n.bytes)],
                  ["Writes a second", rate(tail(name, ["puts", "txns", "deletes"], 1)[0])],
                  ["Drain", s.drain ? <Refusal r={s.drain} /> : n.state === "serving" ? "possible" : "–"],
                  ["Decommission", s.decommission ? <Refusal r={s.decommission} /> : n.state === "serving" ? "possible" : "–"],
                ]}
              />
              {session.value.full && (
                <div class="actions">
                  {n.state === "draining" ? (
                    <Action label="Undrain…" ask={`Take ${name} back into service`} question="It gets leaders and replicas again." run={() => admin("NodeUndrain", { node: n.id })} done={done} />
                  ) : (
                    <Action
                      label="Drain…"
                      danger
                      ask={`Drain ${name}`}
                      question={
                        s.drain ? <Refusal r={s.drain} /> : `${name} hands over the ${count(n.leaders)} ranges that it leads, and gets neither leaders nor replicas until it is taken back. Then it can be stopped.`
                      }
                      run={() => admin("NodeDrain", { node: n.id })}
                      done={done}
                      disabled={n.state !== "serving"}
                    />
                  )}
                </div>
              )}
              {(s.quarantined || []).map((q) => (
                <Problem error={{ message: `Range ${q.range} is in quarantine: ${q.reason}`, next: q.outlook }} />
              ))}
              {(s.operations || []).length > 0 && <h3>Operations</h3>}
              {(s.operations || []).map((o) => (
                <p>
                  {o.kind} of range {o.range} {o.from && `from ${o.from}`} {o.to && `to ${o.to}`}: <span class="dim">{o.why}</span>
                </p>
              ))}
              <h3>Ranges</h3>
              <Table
                heads={[{ name: "Range" }, { name: "From" }, { name: "Role" }, { name: "Size", right: true }]}
                rows={(s.ranges || []).slice(0, 500).map((r) => ({ id: r.id, cells: [r.id, <Key b64={r.start} />, r.leads ? "leads" : r.role, bytes(r.bytes)] }))}
              />
              {(s.ranges || []).length > 500 && <p class="note">The first 500 of {s.ranges.length}.</p>}
            </>
          );
        }}
      </Live>
    </Drawer>
  );
}

const Refusal = ({ r }) => (
  <span class="refusal">
    {r.reason} <em>{r.next_step}</em>
  </span>
);
