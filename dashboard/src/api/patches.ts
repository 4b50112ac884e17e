import type { QueryClient, QueryKey } from "@tanstack/react-query";
import type { Brief, Machine } from "./types";

export const OVERVIEW: QueryKey = ["jobs", "overview"];
export const MACHINES: QueryKey = ["fleet", "machines"];

/** Changes of machines; with `whole`, no others are left. */
export type Machines = { whole: boolean; changed: Machine[]; removed: string[] };

/** Returns the jobs, newest first, with a new or changed one. */
export function withJob(jobs: Brief[], job: Brief): Brief[] {
  if (!jobs.some((each) => each.id === job.id)) {
    return [...jobs, job].sort((one, other) => other.created_at - one.created_at);
  }
  return jobs.map((each) => (each.id === job.id ? job : each));
}

/** Returns the machines after changes, by ID. */
export function withMachines(machines: Machine[], { whole, changed, removed }: Machines) {
  const rows = new Map(whole ? [] : machines.map((each) => [each.id, each]));
  for (const id of removed) rows.delete(id);
  for (const row of changed) rows.set(row.id, row);
  return [...rows.values()].sort((one, other) => (one.id < other.id ? -1 : 1));
}

/** Applies a change from the stream to what is cached, so that lists are not fetched again. */
export function patch(queries: QueryClient, kind: string, data: string) {
  if (kind === "job") {
    const job = JSON.parse(data) as Brief;
    apply<Brief[]>(queries, OVERVIEW, (jobs) => withJob(jobs, job));
  }
  if (kind === "fleet") {
    const { deleted = [] } = JSON.parse(data) as { deleted?: string[] };
    const stays = ({ id }: Brief) => !deleted.includes(id);
    const shown = queries.getQueryData<Brief[]>(OVERVIEW);
    if (!shown?.every(stays)) apply<Brief[]>(queries, OVERVIEW, (jobs) => jobs.filter(stays));
    for (const id of deleted) {
      // A page of the job asks for it again, and says that there is none.
      if (queries.getQueryData(["job", id, "view"]))
        queries.resetQueries({ queryKey: ["job", id] });
    }
  }
  if (kind === "machines") {
    const changes = JSON.parse(data) as Machines;
    apply<Machine[]>(queries, MACHINES, (machines) => withMachines(machines, changes));
  }
}

function apply<T>(queries: QueryClient, queryKey: QueryKey, change: (old: T) => T) {
  // An answer in transit may be older than the change.
  if (queries.isFetching({ queryKey, exact: true })) {
    queries.invalidateQueries({ queryKey, exact: true });
  } else {
    queries.setQueryData<T>(queryKey, (old) => old && change(old));
  }
}
