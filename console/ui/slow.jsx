import { h, Fragment } from "preact";
import { useState } from "preact/hooks";
import { admin, every, usePoll } from "./api.js";
import { bytes, clockTime, dateTime, millis, num } from "./format.js";
import { Choice, Live, NodeName, Page, Table } from "./parts.jsx";
import { ids } from "./overview.jsx";

const palette = ["#2f6fed", "#e0742a", "#1a9c74", "#b14bd0", "#d63a5a", "#7a8b12", "#0f93b8", "#8a6a4a"];

// Slow lists the requests of all nodes that took long, with where their time went.
export function Slow() {
  const poll = usePoll((stop) => admin("Slow", {}, stop), every);
  const [sort, setSort] = useState("time");
  const [open, setOpen] = useState();
  return (
    <Page
      title="Slow requests"
      tools={
        <Choice
          label="order"
          value={sort}
          onChange={setSort}
          options={[
            ["time", "newest first"],
            ["micros", "slowest first"],
          ]}
        />
      }
    >
      <Live poll={poll}>
        {({ calls = [], missing = [] }) => {
          const at = (c) => num(c.at_unix_nanos) / 1e6;
          const sorted = [...calls].sort((a, b) => (sort === "time" ? at(b) - at(a) : num(b.micros) - num(a.micros))).slice(0, 500);
          const stages = [...new Set(calls.flatMap((c) => (c.stages || []).map((s) => s.name)))].sort();
          const colour = (s) => palette[stages.indexOf(s) % palette.length];
          return (
            <>
              {missing.map((m) => (
                <div class="problem soft">{m.node}: {m.reason}</div>
              ))}
              {stages.length > 0 && (
                <p class="legend">
                  {stages.map((s) => (
                    <span>
                      <i class="dot" style={{ background: colour(s) }} />
                      {s}
                    </span>
                  ))}
                </p>
              )}
              <Table
                empty="No request took long. Nodes keep the last 256 each."
                heads={["When", "Node", "Method", { name: "Range", right: true }, { name: "Took", right: true }, "Where the time went", "Cause"]}
                onOpen={(id) => setOpen(open === id ? undefined : id)}
                open={open}
                rows={sorted.map((c, i) => {
                  const id = `${c.at_unix_nanos}/${c.node}/${i}`;
                  return {
                    id,
                    cells: [
                      <time title={dateTime(at(c))}>{clockTime(at(c))}</time>,
                      <NodeName node={nameOf(c.node)} />,
                      (c.method || "").split("/").pop(),
                      num(c.range_id) || "",
                      millis(num(c.micros) / 1000),
                      <Stages c={c} colour={colour} />,
                      <>
                        {c.cause}
                        {open === id && (
                          <div class="dim">
                            {(c.stages || []).map((s) => (
                              <div>
                                {s.name}: {millis(num(s.micros) / 1000)}
                              </div>
                            ))}
                            {num(c.retries) > 0 && <div>{c.retries} retries</div>}
                            <div>
                              {bytes(c.request_bytes)} in, {bytes(c.response_bytes)} out
                            </div>
                          </div>
                        )}
                      </>,
                    ],
                  };
                })}
              />
            </>
          );
        }}
      </Live>
    </Page>
  );
}

// nameOf is the name of a node by its id.
function nameOf(id) {
  const hex = BigInt(id || 0).toString(16);
  return ids.get(hex) || hex;
}

function Stages({ c, colour }) {
  const total = Math.max(num(c.micros), 1);
  return (
    <span class="stages">
      {(c.stages || []).map((s) => (
        <i style={{ width: `${((num(s.micros) / total) * 100).toFixed(1)}%`, background: colour(s.name) }} title={`${s.name}: ${millis(num(s.micros) / 1000)}`} />
      ))}
    </span>
  );
}
