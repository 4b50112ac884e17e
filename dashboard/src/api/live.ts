import { type QueryKey, useQueryClient } from "@tanstack/react-query";
import { useEffect, useSyncExternalStore } from "react";

export type Connection = "connecting" | "live" | "broken";

export const STREAM = "/api/v1/stream";
/** Between two looks at the same part, however much news there is. */
const QUIET_MS = 1_000;
/** How old a page may get while there is no stream. */
export const POLL_MS = 5_000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10_000;

/** The kinds of news that there are. */
const KINDS = ["job", "event", "fleet", "store"];
/** What moves with every update of a job; the rest of it changes with its events. */
const MOVING = ["view", "metrics", "staleness", "subtasks", "cost"];

/** Which queries news makes old: `job` is the one that it is about, if it is about one. */
export function stale(kind: string, job: string): (key: QueryKey) => boolean {
  const own = (key: QueryKey) => key[0] === "job" && key[1] === job;
  switch (kind) {
    case "job":
      return (key) => key[0] === "jobs" || (own(key) && MOVING.includes(String(key[2])));
    case "event":
      return own;
    case "fleet":
      return (key) => key[0] === "fleet" || (key[0] === "job" && key[2] === "machines");
    default:
      return (key) => key[0] === kind;
  }
}

let state: Connection = "connecting";
const listeners = new Set<() => void>();

function become(next: Connection) {
  if (next === state) return;
  state = next;
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function useConnection(): Connection {
  return useSyncExternalStore(subscribe, () => state);
}

/** For `refetchInterval`: without the stream a page looks for news itself. */
export function usePolling(wanted = true): number | false {
  const connection = useConnection();
  return wanted && connection !== "live" ? POLL_MS : false;
}

/** Follows the stream as long as the component is there; only the shell does. */
export function useLive(): Connection {
  const queries = useQueryClient();
  useEffect(() => {
    const look = throttled((about) => {
      const [kind = "", job = ""] = about.split(" ");
      const old = stale(kind, job);
      queries.invalidateQueries({ predicate: ({ queryKey }) => old(queryKey) });
    }, QUIET_MS);
    const onNews = (kind: string, event: MessageEvent<string>) =>
      look.call(`${kind} ${subject(kind, event.data)}`);
    const stop = follow(STREAM, KINDS, onNews, (next) => {
      // what happened meanwhile is on no stream for sure
      if (next === "live" && state === "broken") queries.invalidateQueries();
      become(next);
    });
    return () => {
      stop();
      look.stop();
      become("connecting");
    };
  }, [queries]);
  return useConnection();
}

function subject(kind: string, data: string): string {
  if (kind !== "job" && kind !== "event") return "";
  const news = JSON.parse(data) as { id: string; job?: string };
  return kind === "event" ? (news.job ?? "") : news.id;
}

/**
 * Server-sent events with patience: the browser resumes a stream that broke, with the id of the
 * last event; one that was refused is opened again here, later and later.
 */
export function follow(
  url: string,
  kinds: string[],
  onNews: (kind: string, event: MessageEvent<string>) => void,
  onState: (state: Connection) => void,
): () => void {
  let source: EventSource | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let wait = FIRST_RETRY_MS;
  let lastId = "";
  const open = () => {
    const after = lastId ? `?after=${encodeURIComponent(lastId)}` : "";
    const current = new EventSource(url + after);
    source = current;
    current.onopen = () => {
      wait = FIRST_RETRY_MS;
      onState("live");
    };
    current.onerror = () => {
      onState("broken");
      if (current.readyState === EventSource.CLOSED) {
        timer = setTimeout(open, wait);
        wait = Math.min(2 * wait, LAST_RETRY_MS);
      }
    };
    for (const kind of kinds) {
      current.addEventListener(kind, (event) => {
        lastId = event.lastEventId || lastId;
        onNews(kind, event);
      });
    }
  };
  const again = () => {
    clearTimeout(timer);
    source?.close();
    open();
  };
  open();
  // a laptop that wakes up does not wait for the timer
  window.addEventListener("online", again);
  return () => {
    window.removeEventListener("online", again);
    clearTimeout(timer);
    source?.close();
  };
}

/** Calls for the same key at most once in `quietMs`; the last one is never lost. */
export function throttled(work: (key: string) => void, quietMs: number) {
  const timers = new Map<string, ReturnType<typeof setTimeout>>();
  const last = new Map<string, number>();
  const run = (key: string) => {
    timers.delete(key);
    last.set(key, Date.now());
    // a page that is open for days hears of many jobs
    for (const [other, at] of last) if (at + quietMs < Date.now()) last.delete(other);
    work(key);
  };
  return {
    call: (key: string) => {
      if (timers.has(key)) return;
      const wait = Math.max(0, (last.get(key) ?? 0) + quietMs - Date.now());
      timers.set(
        key,
        setTimeout(() => run(key), wait),
      );
    },
    stop: () => {
      for (const timer of timers.values()) clearTimeout(timer);
    },
  };
}
