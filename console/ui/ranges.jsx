import { h, Fragment } from "preact";
import { useState } from "preact/hooks";
import { admin, ask, every, session, usePoll } from "./api.js";
import { bytes, count, num, pack, parseKey, rate } from "./format.js";
import { Action, Badge, Drawer, Facts, Key, Live, NodeName, Page, Pager, Stale, Table, names, stateKind } from "./parts.jsx";

const size = 100;

// Ranges lists the ranges by pages, and opens one of them.
export function Ranges({ query }) {
  const [text, setText] = useState("");
  const [node, setNode] = useState("");
  const [trouble, setTrouble] = useState(query === "trouble");
  const [sort, setSort] = useState("key");
  const [skip, setSkip] = useState(0);
  const [open, setOpen] = useState();
  const q = { skip, limit: size, sort, node, trouble, text };
  const poll = usePoll((stop) => ask("ranges", q, stop), every, [JSON.stringify(q)]);
  const set = (f) => (v) => {
    f(v);
    setSkip(0);
  };
  return (
    <Page
      title="Ranges"
      hint={poll.data && (poll.data.total === poll.data.all ? `${poll.data.all} in all` : `${poll.data.total} of ${poll.data.all}`)}
      tools={
        <>
          <label class="check">
            <input type="checkbox" checked={trouble} onChange={(e) => set(setTrouble)(e.target.checked)} /> in trouble
          </label>
          <select aria-label="node" value={node} onChange={(e) => set(setNode)(e.target.value)}>
            <option value="">all nodes</option>
            {names.value.map((n) => (
              <option value={n}>{n}</option>
            ))}
          </select>
          <input type="search" placeholder="id, or part of the start  /" value={text} onInput={(e) => set(setText)(e.target.value)} />
        </>
      }
    >
      <Live poll={poll}>
        {({ list, total }) => (
          <>
            <Stale stale={list.stale} />
            {(list.missing || []).map((m) => (
              <div class="problem soft">
                <span>
                  No range is known for the keys from <Key b64={m.start} /> to <Key b64={m.end} end />.
                </span>
              </div>
            ))}
            <Table
              sort={sort}
              onSort={set(setSort)}
              heads={[
                { name: "Range" },
                { name: "From", by: "key" },
                { name: "To" },
                { name: "State" },
                { name: "Leader" },
                { name: "Replicas" },
                { name: "Keys", right: true, by: "keys" },
                { name: "Size", right: true, by: "bytes" },
                { name: "Writes/s", right: true, by: "load" },
                { name: "Reads/s", right: true },
              ]}
              onOpen={setOpen}
              open={open}
              empty={trouble ? "No range is in trouble." : "No range matches."}
              rows={(list.ranges || []).map((r) => ({
                id: r.id,
                cells: [
                  r.id,
                  <Key b64={r.start} />,
                  <Key b64={r.end} end />,
                  <>
                    <Badge kind={stateKind(r.state)}>{r.state}</Badge>
                    {r.operation && <Badge kind="warn">{r.operation.kind}</Badge>}
                  </>,
                  <NodeName node={r.leader} />,
                  <span class="nodes">
                    {(r.replicas || []).map((n) => (
                      <NodeName node={n} />
                    ))}
                  </span>,
                  count(r.keys),
                  bytes(r.bytes),
                  rate(r.writes_per_second),
                  rate(r.reads_per_second),
                ],
              }))}
            />
            <Pager skip={skip} size={size} total={total} onSkip={setSkip} />
          </>
        )}
      </Live>
      {open && <One key={open} id={open} onClose={() => setOpen()} changed={poll.again} />}
    </Page>
  );
}

// One shows a range, what each replica says of itself, and what can be done with it.
function One({ id, onClose, changed }) {
  const poll = usePoll((stop) => admin("RangeShow", { id }, stop), every);
  const done = () => {
    changed();
    poll.again();
  };
  return (
    <Drawer title={`Range ${id}`} onClose={onClose}>
      <Live poll={poll}>
        {({ range: r, replicas }) => (
          <>
            <Facts
              rows={[
                ["From", <Key b64={r.start} />],
                ["To", <Key b64={r.end} end />],
                ["State", <Badge kind={stateKind(r.state)}>{r.state}</Badge>],
                r.waits_for?.length && ["Waits for", r.waits_for.join(", ")],
                ["Leader", <NodeName node={r.leader} />],
                ["Generation", r.generation],
                ["Keys", count(r.keys)],
                ["Size on disk", bytes(r.bytes)],
                ["Load", `${rate(r.writes_per_second)} writes/s (${bytes(r.write_bytes_per_second)}/s), ${rate(r.reads_per_second)} reads/s`],
                ["Border", r.kept ? "set by command" : "may merge by itself"],
                r.operation && ["Operation", `${r.operation.kind} ${r.operation.from || ""} → ${r.operation.to || ""}: ${r.operation.why || ""}`],
              ]}
            />
            <h3>Replicas</h3>
            <Table
              heads={["Node", "Role", "Does", { name: "Applied", right: true }, { name: "Keys", right: true }, { name: "Size", right: true }]}
              rows={(replicas || []).map((x) => {
                const s = state(x.state_json);
                return {
                  id: x.node + x.replica_id,
                  cells: x.error
                    ? [<NodeName node={x.node} />, x.role, <span class="bad">{x.error}</span>, "", "", ""]
                    : [<NodeName node={x.node} />, x.role, does(s), s.raft?.Applied ?? "?", s.counted ? count(s.keys) : "?", bytes(s.bytes)],
                };
              })}
            />
            {session.value.full && <Commands r={r} done={done} />}
          </>
        )}
      </Live>
    </Drawer>
  );
}

function state(json) {
  try {
    return JSON.parse(json);
  } catch {
    return {};
  }
}

const does = (s) =>
  [s.disagrees ? "disagrees with others" : s.raft?.Receiving ? "receives a copy" : s.serving ? "leads" : s.raft?.IsLeader ? "is about to lead" : "follows", s.draining && "hands over", s.raft?.Asleep && "asleep"]
    .filter(Boolean)
    .join(", ");

function Commands({ r, done }) {
  const holders = r.replicas || [];
  const others = names.value.filter((n) => !holders.includes(n));
  return (
    <>
      <h3>Commands</h3>
      <div class="actions">
        <Action
          label="Split…"
          ask={`Split range ${r.id}`}
          question="A new range begins at the key. It stays a border until it is merged by command."
          fields={[{ name: "key", label: "First key of the new range" }]}
          run={({ key }) => admin("RangeSplit", { key: pack(parseKey(key)) })}
          done={done}
        />
        <Action
          label="Hand over…"
          ask={`Have another node lead range ${r.id}`}
          fields={[{ name: "to", label: "New leader", options: holders.filter((n) => n !== r.leader) }]}
          run={({ to }) => admin("RangeTransferLeader", { id: r.id, to })}
          done={done}
          disabled={holders.length < 2}
        />
        <Action
          label="Move…"
          ask={`Move a replica of range ${r.id}`}
          question="The new node gets a copy first, and then takes the place of the old one."
          fields={[
            { name: "from", label: "From", options: holders },
            { name: "to", label: "To", options: others },
          ]}
          run={({ from, to }) => admin("RangeMove", { id: r.id, from, to })}
          done={done}
          disabled={others.length === 0}
        />
        <Action
          label="Merge…"
          ask={`Merge range ${r.id} with its right neighbour`}
          question="The neighbour ends, and this range has its keys too."
          run={() => admin("RangeMerge", { left: r.id })}
          done={done}
          disabled={!r.end}
        />
      </div>
      {num(r.keys) < 0 && <p class="note">Its keys are being counted after a split.</p>}
    </>
  );
}
