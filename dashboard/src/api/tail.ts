import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useEffect, useState } from "react";
import { api, body } from "./client";
import { type Connection, follow, usePolling } from "./live";
import type { JobEvent, LogLine } from "./types";

/** The newest entries that a page keeps, so that one open for hours does not grow. */
export const KEPT = 2_000;
/** Entries are shown together, not one by one. */
const GATHER_MS = 150;
const BATCH = 1_000;

type Entry = { id: string };

/** What happened to a job; each look asks only for what came after the last one. */
export function useEvents(job: string) {
  const queries = useQueryClient();
  const queryKey = ["job", job, "events"];
  return useQuery({
    queryKey,
    queryFn: async () => {
      let known = queries.getQueryData<JobEvent[]>(queryKey) ?? [];
      for (;;) {
        const fresh = await eventsAfter(job, known.at(-1)?.id ?? "0");
        known = merged(known, fresh);
        if (fresh.length < BATCH) return known;
      }
    },
    refetchInterval: usePolling(),
  });
}

async function eventsAfter(job: string, after: string): Promise<JobEvent[]> {
  const query = { after, limit: BATCH };
  const answer = await api.GET("/api/v1/jobs/{job}/events", { params: { path: { job }, query } });
  // as a list, unless a stream is asked for
  return body(answer) as JobEvent[];
}

/** What a job's workers print, as it comes; `ended`: there will be no more. */
export function useLogs(job: string) {
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
    const onNews = (kind: string, event: MessageEvent<string>) => {
      if (kind === "end") {
        stop();
        setEnded(true);
        return;
      }
      fresh.push(JSON.parse(event.data) as LogLine);
      timer ??= setTimeout(flush, GATHER_MS);
    };
    const stop = follow(`/api/v1/jobs/${job}/logs`, ["line", "end"], onNews, setState);
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, [job]);
  return { lines, state, ended };
}

/** A resumed stream may repeat what is there already. */
export function merged<T extends Entry>(before: T[], added: T[]): T[] {
  const known = new Set(before.map((each) => each.id));
  return [...before, ...added.filter((each) => !known.has(each.id))].slice(-KEPT);
}
