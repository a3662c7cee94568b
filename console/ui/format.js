// Numbers, times and keys as people read them. A key is base64 where it comes from the API, and text where people see it:
// what is no printable UTF-8 becomes \xNN, so that what is shown can be pasted back.

export const num = (v) => Number(v || 0);

export function count(v) {
  v = num(v);
  if (v < 0) return "?";
  if (v < 10000) return String(Math.round(v));
  return short(v, 1000, ["", " k", " M", " G", " T"]);
}

export function bytes(v) {
  v = num(v);
  if (v < 0) return "?";
  return short(v, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"]);
}

function short(v, step, units) {
  let i = 0;
  while (v >= step && i < units.length - 1) {
    v /= step;
    i++;
  }
  return (i === 0 ? Math.round(v) : v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v.toFixed(2)) + units[i];
}

export function rate(v) {
  v = num(v);
  if (v === 0) return "0";
  if (v < 0.05) return "<0.1";
  if (v < 100) return v.toFixed(1);
  return count(v);
}

export function millis(v) {
  v = num(v);
  if (v === 0) return "–";
  if (v < 1) return (v * 1000).toFixed(0) + " µs";
  if (v < 10) return v.toFixed(2) + " ms";
  if (v < 1000) return v.toFixed(0) + " ms";
  return (v / 1000).toFixed(2) + " s";
}

export function span(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min";
  if (s < 86400) return Math.floor(s / 3600) + " h " + (Math.floor(s / 60) % 60) + " min";
  return Math.floor(s / 86400) + " d " + (Math.floor(s / 3600) % 24) + " h";
}

export const ago = (unixMs, now) => (num(unixMs) ? span((now - num(unixMs)) / 1000) + " ago" : "–");

const two = (n) => String(n).padStart(2, "0");
export const clockTime = (ms) => {
  const d = new Date(ms);
  return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
};
export const dateTime = (ms) => {
  const d = new Date(ms);
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${two(d.getHours())}:${two(d.getMinutes())}`;
};

// unpack makes bytes of base64, pack base64 of bytes.
export function unpack(b64) {
  if (!b64) return new Uint8Array();
  const s = atob(b64);
  const b = new Uint8Array(s.length);
  for (let i = 0; i < s.length; i++) b[i] = s.charCodeAt(i);
  return b;
}

export function pack(b) {
  let s = "";
  for (let i = 0; i < b.length; i += 8192) s += String.fromCharCode(...b.subarray(i, i + 8192));
  return btoa(s);
}

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const printable = /^[^\p{C}\p{Zl}\p{Zp}]$/u;
const hex = (n) => "\\x" + n.toString(16).padStart(2, "0");

// text shows bytes; lines keeps line feeds and tabs as they are, for values.
export function text(b, lines = false) {
  let out = "";
  for (let i = 0; i < b.length; ) {
    const size = b[i] < 0x80 ? 1 : b[i] >= 0xf0 ? 4 : b[i] >= 0xe0 ? 3 : 2;
    let c = "";
    try {
      c = strict.decode(b.subarray(i, i + size));
    } catch {
      c = "";
    }
    if (c === "\\") out += lines ? "\\" : "\\\\";
    else if (lines && (c === "\n" || c === "\t")) out += c;
    else if (c !== "" && [...c].length === 1 && printable.test(c)) out += c;
    else {
      out += hex(b[i]);
      i++;
      continue;
    }
    i += size;
  }
  return out;
}

// isText says whether a value is text, and so can be edited as such.
export function isText(b) {
  try {
    return !/[\p{Cc}\p{Cs}]/u.test(strict.decode(b).replace(/[\n\t\r]/g, ""));
  } catch {
    return false;
  }
}

// toEdit is the text of a value as a text area has it, which knows line feeds alone. edited is the value that such a text
// makes of another one: its lines end as those do. editable says whether a value comes back as it was, so that an edit
// changes nothing that nobody has edited.
export const toEdit = (b) => strict.decode(b).replace(/\r\n?/g, "\n");
export function edited(v, b) {
  const lines = v.replace(/\r\n?/g, "\n");
  return new TextEncoder().encode(strict.decode(b).includes("\r\n") ? lines.replace(/\n/g, "\r\n") : lines);
}
export function editable(b) {
  return isText(b) && pack(edited(toEdit(b), b)) === pack(b);
}

export const key = (b64) => text(unpack(b64));

// parseKey is what text shows, backwards.
export function parseKey(s) {
  const out = [];
  const utf8 = new TextEncoder();
  for (let i = 0; i < s.length; ) {
    const m = /^\\x([0-9a-fA-F]{2})/.exec(s.slice(i, i + 4));
    if (m) {
      out.push(parseInt(m[1], 16));
      i += 4;
    } else if (s.startsWith("\\\\", i)) {
      out.push(0x5c);
      i += 2;
    } else {
      const c = String.fromCodePoint(s.codePointAt(i));
      out.push(...utf8.encode(c));
      i += c.length;
    }
  }
  return new Uint8Array(out);
}

// beyond is the end of a prefix: the first key behind all that begin with it.
export function beyond(b) {
  const end = Uint8Array.from(b);
  for (let i = end.length - 1; i >= 0; i--) {
    if (end[i] < 0xff) {
      end[i]++;
      return end.subarray(0, i + 1);
    }
  }
  return new Uint8Array([0]);
}
