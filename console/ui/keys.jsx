import { h, Fragment } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ask, every, kv, session, usePoll } from "./api.js";
import { beyond, bytes, count, editable, edited, isText, key as keyText, num, pack, parseKey, text as textOf, toEdit, unpack } from "./format.js";
import { Action, Badge, Drawer, Facts, Key, Live, Page, Problem, Table } from "./parts.jsx";

const size = 200;
const nul = new Uint8Array([0]);

// Keys goes through the keys that begin with a prefix, at this moment or at a revision.
export function Keys() {
  const [prefix, setPrefix] = useState("");
  const [revision, setRevision] = useState("");
  const [pages, setPages] = useState([""]); // where each page up to this one begins, in base64
  const [open, setOpen] = useState();
  const from = pages[pages.length - 1];
  const poll = usePoll(
    async (stop) => {
      const p = parseKey(prefix);
      const span = p.length ? { key: from || pack(p), range_end: pack(beyond(p)) } : { key: from || pack(nul), range_end: pack(nul) };
      return kv("Range", { ...span, limit: String(size), keys_only: true, revision: revision || undefined }, stop);
    },
    revision ? 0 : every,
    [prefix, revision, from],
  );
  useEffect(() => setPages([""]), [prefix, revision]);
  const kvs = poll.data?.kvs || [];
  const next = () => {
    const last = unpack(kvs[kvs.length - 1].key);
    const after = new Uint8Array(last.length + 1); // the first key behind it
    after.set(last);
    setPages([...pages, pack(after)]);
  };
  return (
    <Page
      title="Keys"
      hint={poll.data && `${count(num(poll.data.count) + 0)} ${pages.length > 1 ? "from here on" : "in all"}, at revision ${poll.data.header?.revision}`}
      tools={
        <>
          <input type="search" class="long" placeholder="prefix  /" aria-label="prefix" spellcheck={false} value={prefix} onInput={(e) => setPrefix(e.target.value)} />
          <input type="text" inputmode="numeric" placeholder="revision: now" aria-label="revision" class="short" value={revision} onInput={(e) => setRevision(e.target.value.replace(/\D/g, ""))} />
          {session.value.full && !revision && (
            <Action
              label="New key…"
              ask="Put a key that is not there yet"
              fields={[
                { name: "key", label: "Key", value: prefix },
                { name: "value", label: "Value", lines: true },
              ]}
              run={({ key, value }) => edit(pack(parseKey(key)), 0, { request_put: { key: pack(parseKey(key)), value: pack(new TextEncoder().encode(value)) } })}
              done={poll.again}
            />
          )}
        </>
      }
    >
      <Live poll={poll}>
        {() => (
          <>
            <Table
              empty={prefix ? "No key begins with it." : "There are no keys, or none that you may read: give a prefix."}
              heads={[{ name: "Key" }, { name: "Changed at", right: true }, { name: "Created at", right: true }, { name: "Version", right: true }]}
              onOpen={setOpen}
              open={open}
              rows={kvs.map((k) => ({
                id: k.key,
                cells: [<Key b64={k.key} />, k.mod_revision, k.create_revision, k.version],
              }))}
            />
            {(pages.length > 1 || poll.data.more) && (
              <nav class="pager" aria-label="pages">
                <button disabled={pages.length === 1} onClick={() => setPages(pages.slice(0, -1))}>
                  Previous
                </button>
                <span>page {pages.length}</span>
                <button disabled={!poll.data.more} onClick={next}>
                  Next
                </button>
              </nav>
            )}
          </>
        )}
      </Live>
      {open && <One key={open + revision} b64={open} revision={revision} onClose={() => setOpen()} changed={poll.again} />}
    </Page>
  );
}

// edit does something with a key if it is as it was: it was last changed at that revision, 0 if it was not there.
async function edit(b64, modRevision, op) {
  const r = await kv("Txn", { compare: [{ key: b64, target: "MOD", result: "EQUAL", mod_revision: String(modRevision) }], success: [op] });
  if (!r.succeeded) throw new Error(modRevision ? "the key has changed meanwhile: nothing was done" : "the key is there already: nothing was done");
}

// One shows a key's value, and what it was before.
function One({ b64, revision, onClose, changed }) {
  const [more, setMore] = useState([]); // versions behind the first page
  const [end, setEnd] = useState();
  const [error, setError] = useState();
  const [shown, setShown] = useState();
  const value = usePoll((stop) => kv("Range", { key: b64, revision: revision || undefined }, stop), revision ? 0 : every);
  const now = value.data?.kvs?.[0];
  const history = usePoll((stop) => ask("history", { key: b64, revision: num(revision) }, stop), 0, [now?.mod_revision]);
  useEffect(() => {
    setMore([]);
    setEnd();
  }, [now?.mod_revision]);
  const versions = [...(history.data?.versions || []), ...more];
  const last = end || history.data;
  const older = async () => {
    try {
      const page = await ask("history", { key: b64, revision: last.next });
      setMore([...more, ...page.versions]);
      setEnd(page);
    } catch (e) {
      setError(e);
    }
  };
  const done = () => {
    changed();
    value.again();
  };
  const picked = shown !== undefined && versions.find((v) => v.mod_revision === shown);
  const b = now && unpack(now.value);
  return (
    <Drawer title={keyText(b64)} onClose={onClose}>
      <Live poll={value}>
        {() =>
          now ? (
            <>
              <Facts
                rows={[
                  ["Value", `${bytes(b.length)}, ${isText(b) ? "text" : "binary"}`],
                  ["Changed at", `revision ${now.mod_revision}`],
                  ["Created at", `revision ${now.create_revision}`],
                  ["Version", now.version],
                  num(now.lease) && ["Lease", <code>{BigInt(now.lease).toString(16)}</code>],
                ]}
              />
              <Value b={b} />
              {session.value.full && !revision && (
                <div class="actions">
                  {b.length < 256 << 10 && editable(b) && (
                    <Action
                      label="Edit…"
                      ask={`Edit ${keyText(b64)}`}
                      question="It is written only if nobody has changed it meanwhile. Its lease stays."
                      fields={[{ name: "value", label: "Value", lines: true, value: toEdit(b) }]}
                      run={({ value: v }) =>
                        edit(b64, now.mod_revision, { request_put: { key: b64, value: pack(edited(v, b)), ignore_lease: num(now.lease) !== 0 } })
                      }
                      done={done}
                    />
                  )}
                  <Action
                    label="Delete…"
                    danger
                    ask={`Delete ${keyText(b64)}`}
                    question="It is deleted only if nobody has changed it meanwhile."
                    run={() => edit(b64, now.mod_revision, { request_delete_range: { key: b64 } })}
                    done={done}
                  />
                </div>
              )}
            </>
          ) : (
            <p class="empty">The key is not there{revision ? ` at revision ${revision}` : " any more. Look at an earlier revision to see it"}.</p>
          )
        }
      </Live>
      <h3>History</h3>
      <Problem error={history.error || error} />
      <div class="history">
        {versions.map((v) => (
          <button class={"version" + (v.mod_revision === shown ? " on" : "")} aria-expanded={v.mod_revision === shown} onClick={() => setShown(v.mod_revision === shown ? undefined : v.mod_revision)}>
            <b>{v.mod_revision}</b>
            <span class="dim">version {v.version}</span>
            <code>{textOf(unpack(v.value)).slice(0, 80)}</code>
            <span class="dim">{bytes(v.bytes)}</span>
          </button>
        ))}
      </div>
      {picked && <Value b={unpack(picked.value)} cut={picked.bytes} />}
      {last?.end === "more" && <button onClick={older}>Older versions</button>}
      {last && last.end !== "more" && (
        <p class="note">
          {{ created: "The oldest one created the key. What it was in an earlier life is seen at an earlier revision.", compacted: "What is older was compacted.", absent: "There is nothing older." }[last.end]}
        </p>
      )}
    </Drawer>
  );
}

// Value shows a value: JSON with its lines, other text as it is, and bytes as hex.
function Value({ b, cut }) {
  const [raw, setRaw] = useState(false);
  const most = 64 << 10;
  let shown, kind;
  if (!isText(b)) {
    kind = "hex";
    shown = hexDump(b.subarray(0, 4096));
  } else {
    shown = textOf(b.subarray(0, most), true);
    try {
      const parsed = JSON.parse(shown);
      if (typeof parsed === "object" && parsed !== null) {
        kind = "JSON";
        if (!raw) shown = JSON.stringify(parsed, null, 2);
      }
    } catch {
      kind = "text";
    }
  }
  const total = cut ?? b.length;
  return (
    <div class="value">
      {kind === "JSON" && (
        <button class="plain corner" onClick={() => setRaw(!raw)}>
          {raw ? "indent" : "raw"}
        </button>
      )}
      {kind === "hex" && <Badge kind="quiet">no UTF-8: hex</Badge>}
      <pre tabIndex={0}>{shown || " "}</pre>
      {total > (kind === "hex" ? 4096 : Math.min(most, b.length)) && <p class="note">The beginning of {bytes(total)}.</p>}
    </div>
  );
}

function hexDump(b) {
  const lines = [];
  for (let i = 0; i < b.length; i += 16) {
    const row = [...b.subarray(i, i + 16)];
    lines.push(
      i.toString(16).padStart(6, "0") +
        "  " +
        row.map((x) => x.toString(16).padStart(2, "0")).join(" ").padEnd(48) +
        " " +
        row.map((x) => (x >= 0x20 && x < 0x7f ? String.fromCharCode(x) : ".")).join(""),
    );
  }
  return lines.join("\n");
}
