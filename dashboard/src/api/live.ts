import { useQueryClient } from "@tanstack/react-query";
import { useEffect, useSyncExternalStore } from "react";

export type Connection = "connecting" | "live" | "broken";

export const STREAM = "/api/v1/stream";
/** Between two looks at the same part, however much news there is. */
const QUIET_MS = 1_000;
/** How old a page may get while there is no stream. */
export const POLL_MS = 5_000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10_000;

/** Which queries a kind of news makes old, by the beginning of their keys. */
export const STALE: Record<string, string[][]> = {
  job: [["jobs"], ["job"]],
  event: [["job"]],
  fleet: [["fleet"]],
  store: [["store"]],
};

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
    const stale = throttled((kind) => {
      for (const queryKey of STALE[kind] ?? []) queries.invalidateQueries({ queryKey });
    }, QUIET_MS);
    const stop = follow(STREAM, Object.keys(STALE), stale.call, (next) => {
      // what happened meanwhile is on no stream for sure
      if (next === "live" && state === "broken") queries.invalidateQueries();
      become(next);
    });
    return () => {
      stop();
      stale.stop();
      become("connecting");
    };
  }, [queries]);
  return useConnection();
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
