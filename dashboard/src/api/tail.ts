import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useEffect, useState } from "react";
import { api, body } from "./client";
import { type Connection, follow, usePolling } from "./live";
import type { JobEvent, LogLine } from "./types";

/** Maximum number of entries that a page keeps; bounds its memory. */
export const KEPT = 2_000;
/** Time to collect entries before they are shown. */
const COLLECT_MS = 150;
const BATCH = 1_000;

type Entry = { id: string };

/** Events of a job; each refresh fetches only newer events. */
export function useEvents(job: string) {
  const queries = useQueryClient();
  const queryKey = ["job", job, "events"];
  return useQuery({
    queryKey,
    queryFn: async () => {
      let events = queries.getQueryData<JobEvent[]>(queryKey) ?? [];
      for (;;) {
        const fresh = await eventsAfter(job, events.at(-1)?.id ?? "0");
        events = merged(events, fresh);
        if (fresh.length < BATCH) return events;
      }
    },
    refetchInterval: usePolling(),
  });
}

async function eventsAfter(job: string, after: string): Promise<JobEvent[]> {
  const query = { after, limit: BATCH };
  const answer = await api.GET("/api/v1/jobs/{job}/events", { params: { path: { job }, query } });
  // The answer is a list, because the request does not ask for a stream.
  return body(answer) as JobEvent[];
}

/** Selection of lines, which the API makes among all that it keeps. */
export type Selection = { worker: string; grep: string };

/** Live lines of a job's workers; `ended` is true after the last line. */
export function useLogs(job: string, { worker, grep }: Selection) {
  const [lines, setLines] = useState<LogLine[]>([]);
  const [state, setState] = useState<Connection>("connecting");
  const [ended, setEnded] = useState(false);
  useEffect(() => {
    let fresh: LogLine[] = [];
    let timer: ReturnType<typeof setTimeout> | undefined;
    setLines([]);
    setEnded(false);
    const flush = () => {
      timer = undefined;
      const added = fresh;
      fresh = [];
      setLines((before) => merged(before, added));
    };
    const onEvent = (kind: string, event: MessageEvent<string>) => {
      if (kind === "end") {
        stop();
        setEnded(true);
        return;
      }
      fresh.push(JSON.parse(event.data) as LogLine);
      timer ??= setTimeout(flush, COLLECT_MS);
    };
    const query = new URLSearchParams({ tail: String(KEPT), worker, grep });
    const url = `/api/v1/jobs/${job}/logs?${query}`;
    const stop = follow(url, ["line", "end"], onEvent, setState);
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, [job, worker, grep]);
  return { lines, state, ended };
}

/** Appends entries without duplicates, which a resumed stream can repeat. */
export function merged<T extends Entry>(before: T[], added: T[]): T[] {
  const ids = new Set(before.map((each) => each.id));
  return [...before, ...added.filter((each) => !ids.has(each.id))].slice(-KEPT);
}
