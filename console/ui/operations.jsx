import { h, Fragment } from "preact";
import { ask, every, usePoll } from "./api.js";
import { ago, count, dateTime, num } from "./format.js";
import { Badge, Card, Facts, Live, NodeName, Page, Stale, Table } from "./parts.jsx";

// Operations shows what is done with ranges, and what keeps old versions.
export function Operations() {
  const poll = usePoll((stop) => ask("survey", {}, stop), every);
  return (
    <Page title="Operations">
      <Live poll={poll}>
        {({ survey: s }) => {
          const r = s.replication;
          return (
            <>
              <Stale stale={s.stale} />
              {r?.paused && <div class="problem soft">Placement is paused: it decides nothing by itself, repairs included. skein placement resume has it go on.</div>}
              <Card title="Under way" wide>
                <Table
                  empty="Nothing is being moved, added, removed or merged."
                  heads={[{ name: "Operation" }, { name: "What" }, { name: "Range" }, { name: "From" }, { name: "To" }, { name: "Reason" }, { name: "Why" }]}
                  rows={(s.operations || []).map((o) => ({
                    id: o.id,
                    cells: [
                      o.id,
                      <>
                        {o.kind} {o.phase && <Badge kind="info">{o.phase}</Badge>}
                      </>,
                      num(o.range) ? o.range : "placement",
                      o.from ? <NodeName node={o.from} /> : "",
                      o.to ? <NodeName node={o.to} /> : o.right ? `with ${o.right}` : "",
                      o.reason,
                      <span class="dim">{o.why}</span>,
                    ],
                  }))}
                />
              </Card>
              <div class="charts">
                <Card title="Replication">
                  {r ? (
                    <Facts
                      rows={[
                        ["Voters of each range", count(r.factor)],
                        ["Ranges", count(r.ranges)],
                        ["With fewer", count(r.fewer)],
                        ["With more", count(r.more)],
                        ["With a silent voter", count(r.silent)],
                        ["Placement", r.paused ? <Badge kind="warn">paused</Badge> : <Badge kind="good">decides by itself</Badge>],
                      ]}
                    />
                  ) : (
                    <p class="empty">Not known without a quorum.</p>
                  )}
                </Card>
                <Card title="Versions">
                  <Facts
                    rows={[
                      ["Cluster version", count(s.versions?.version)],
                      num(s.versions?.next) > 0 && ["Can be raised to", s.versions.next],
                      ...(s.versions?.nodes || []).map((n) => [n.name, `${n.build || "?"}, reads ${n.oldest || "?"} to ${n.newest || "?"}`]),
                    ]}
                  />
                </Card>
              </div>
              <Card title="Holds of old versions" wide>
                <Table
                  empty="Nothing keeps old versions from being removed."
                  heads={["Hold", "Kind", "Owner", { name: "Revision", right: true }, "Made", "Ends"]}
                  rows={(s.holds || []).map((x) => ({
                    id: x.id,
                    cells: [<code>{x.id}</code>, x.kind, x.owner, x.revision, ago(x.made_unix_ms, num(s.unix_ms)), dateTime(num(x.expires_unix_ms))],
                  }))}
                />
              </Card>
              <Card title="Alarms" wide>
                <Table
                  empty="There is no alarm."
                  heads={["Alarm", "Node", "Ends"]}
                  rows={(s.alarms || []).map((x) => ({ id: x.type + x.node, cells: [<Badge kind="bad">{x.type}</Badge>, <NodeName node={x.node} />, x.sticky ? "by etcdctl alarm disarm" : "with its cause"] }))}
                />
              </Card>
            </>
          );
        }}
      </Live>
    </Page>
  );
}
