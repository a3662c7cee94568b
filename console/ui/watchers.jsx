import { h, Fragment } from "preact";
import { useState } from "preact/hooks";
import { ask, usePoll } from "./api.js";
import { count, rate, span } from "./format.js";
import { Card, Key, Live, Page, Pager, Table, names } from "./parts.jsx";
import { Chart } from "./chart.jsx";
import { useSeries } from "./series.js";

const size = 50;

// Watchers shows who watches how much, and the leases with their keys.
export function Watchers() {
  useSeries();
  const [skip, setSkip] = useState(0);
  const leases = usePoll((stop) => ask("leases", { skip }, stop), 5000, [skip]);
  const nodes = names.value;
  return (
    <Page title="Watchers and leases" hint="by the node that clients are connected to">
      <div class="charts">
        <Chart title="Watchers" nodes={nodes} series={["watchers"]} format={count} />
        <Chart title="Events sent a second" nodes={nodes} series={["events"]} format={rate} />
        <Chart title="Watchers behind" nodes={nodes} series={["slow_watchers"]} format={count} note="They read history because their clients are slow, or because they began in the past." />
        <Chart title="Events that wait" nodes={nodes} series={["pending_events"]} format={count} note="Queued for clients. What grows here grows in memory." />
      </div>
      <Card title="Leases" side={leases.data && `${leases.data.total} in all`} wide>
        <Live poll={leases}>
          {({ leases: all, total }) => (
            <>
              <Table
                empty="There are no leases."
                heads={["Lease", { name: "Left", right: true }, { name: "Granted", right: true }, { name: "Keys", right: true }, "Which"]}
                rows={all.map((l) => ({
                  id: l.id,
                  cells: [
                    <code>{BigInt(l.id).toString(16)}</code>,
                    l.error ? <span class="dim">{l.error}</span> : span(l.ttl),
                    l.error ? "" : span(l.granted),
                    l.error ? "" : count(l.count),
                    <span class="keys">
                      {(l.keys || []).map((k) => (
                        <Key b64={k} />
                      ))}
                      {l.count > (l.keys || []).length && <span class="dim"> and {l.count - (l.keys || []).length} more</span>}
                    </span>,
                  ],
                }))}
              />
              <Pager skip={skip} size={size} total={total} onSkip={setSkip} />
            </>
          )}
        </Live>
      </Card>
    </Page>
  );
}
