// The console's API: requests, who is here, and what is asked again while the page is seen.
import { signal } from "@preact/signals";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

// session is what /console/api/session says, null before it has.
export const session = signal(null);

// token is in memory alone: a reload logs out, and no other page can use it.
export const token = signal("");
export const user = signal("");

// Failure is an answer that says what went wrong and what to do next.
export class Failure extends Error {
  constructor(status, body) {
    super(body.error || `the node answered with status ${status}`);
    this.status = status;
    this.next = body.next || "";
  }
}

// ask sends one request to the API.
export async function ask(path, body = {}, stop) {
  const headers = { "Content-Type": "application/json", "X-Skein-Console": "1" };
  if (token.value) headers.Authorization = "Bearer " + token.value;
  let resp;
  try {
    resp = await fetch("api/" + path, { method: "POST", headers, body: JSON.stringify(body), signal: stop });
  } catch (e) {
    if (stop?.aborted) throw e;
    throw new Failure(0, { error: "the node cannot be reached", next: "it may be stopped: open the console of another node" });
  }
  const answer = await resp.json().catch(() => ({}));
  if (resp.ok) return answer;
  if (answer.login && path !== "login") {
    token.value = "";
    session.value = { ...session.value, auth: true, login: true, root: false };
  }
  throw new Failure(resp.status, answer);
}

export const admin = (method, body, stop) => ask("call/skein.admin.v1.Admin/" + method, body, stop);
export const kv = (method, body, stop) => ask("call/etcdserverpb.KV/" + method, body, stop);

// begin asks who is here.
export async function begin() {
  session.value = await ask("session");
}

// logIn gets a token for the name, and asks anew who is here.
export async function logIn(name, password) {
  const { token: t } = await ask("login", { name, password });
  token.value = t;
  user.value = name;
  await begin();
}

export async function logOut() {
  token.value = "";
  user.value = "";
  await begin();
}

// usePoll asks now and then again, while the page is seen. It keeps the last answer beside an error. again asks at once.
// It asks before the page is painted: an effect would wait for that.
export function usePoll(load, every, deps = []) {
  const [state, set] = useState({});
  const kick = useRef(() => {});
  useLayoutEffect(() => {
    const stop = new AbortController();
    let timer = 0, busy = false, once_more = false;
    const run = async () => {
      clearTimeout(timer);
      if (stop.signal.aborted || document.hidden) return;
      if (busy) {
        once_more = true;
        return;
      }
      busy = true;
      try {
        const data = await load(stop.signal);
        if (!stop.signal.aborted) set({ data, at: Date.now() });
      } catch (error) {
        if (!stop.signal.aborted) set((s) => ({ ...s, error }));
      }
      busy = false;
      if (stop.signal.aborted) return;
      if (once_more) {
        once_more = false;
        run();
      } else if (every) {
        timer = setTimeout(run, every);
      }
    };
    kick.current = run;
    document.addEventListener("visibilitychange", run);
    run();
    return () => {
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", run);
    };
  }, deps);
  return { ...state, again: () => kick.current() };
}

// every is how often what is live is asked for, in milliseconds.
export const every = 2000;
